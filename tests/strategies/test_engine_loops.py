"""The loops of Accelerate's and Fabric's scripts, with stand-ins for the libraries that do what their documentation
says: what each is asked for, and that a step is PyTorch's. test_engines.py has the libraries themselves."""

from types import SimpleNamespace

import pytest
import torch
from engine_stand_ins import Accelerator, Fabric, alone, on_rank_1_of_4, prepare_data_loader, scripts, steps
from torch.utils.checkpoint import checkpoint

from common.data import Plan, Text, shard
from common.errors import UserError
from common.lab import equality
from common.model import GPT


@pytest.fixture
def script(monkeypatch):
    """Imports a script with the stand-ins in place of its library."""
    on_rank_1_of_4(monkeypatch)
    yield from scripts(monkeypatch)


@pytest.mark.parametrize("name, cls", [("with_accelerate", "DDPWithAccelerate"), ("with_fabric", "DDPWithFabric")])
def test_a_step_is_that_of_one_process(script, name, cls):
    losses, norms, weights = alone(0.3)
    torch.manual_seed(0)
    strategy = getattr(script(f"ddp.{name}"), cls)(equality.tied(GPT), equality.sgd, "mesh", max_norm=0.3)
    found = [tuple(map(float, strategy.step(step))) for step in steps(2, 3)]
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5), "losses of two steps, of three parts each"
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-5), "norms of the gradients before clipping"
    for key, value in weights.items():
        torch.testing.assert_close(strategy.model.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)
    library = strategy.accelerator if name == "with_accelerate" else strategy.fabric
    assert library.synchronised == [False, False, True] * 2, "gradients are sent in a step's last backward pass alone"
    assert library.reduced == ["mean"] * 2, "the loss that is told is the mean over ranks"
    assert not any(getattr(library, "outside", [])), "the model computes in accelerator.autocast()"
    assert strategy.wrapped is strategy.model and strategy.optimizer.param_groups[0]["params"]


def test_what_accelerate_is_asked_for(script, monkeypatch):
    module = script("ddp.with_accelerate")
    for precision, called in (("fp32", "no"), ("bf16", "bf16"), ("fp16", "fp16")):
        one = module.DDPWithAccelerate(equality.tied(GPT), equality.sgd, "mesh", precision=precision)
        plugin = {"num_steps": 1, "sync_with_dataloader": False}
        assert Accelerator.settings == {
            "mixed_precision": called, "cpu": True, "gradient_accumulation_plugin": plugin
        }, f"Accelerator's settings, in {precision}"  # fmt: skip
        assert one.scaler.is_enabled() == (precision == "fp16"), "without a scaler of Accelerate's, the strategy's own"
    monkeypatch.setattr(Accelerator, "scaler", "Accelerate's scaler")
    one = module.DDPWithAccelerate(equality.tied(GPT), equality.sgd, "mesh")
    assert one.scaler == "Accelerate's scaler", "the scaler that is kept in checkpoints"
    config = SimpleNamespace(precision="fp16", task="text", options=module.DDPWithAccelerate.Options())
    with pytest.raises(UserError, match="^--precision fp16: Accelerate scales losses on GPUs only; try bf16, or fp32$"):
        module.DDPWithAccelerate.require(config, {"data": 2})
    config.precision = "bf16"
    module.DDPWithAccelerate.require(config, {"data": 2})
    assert module.DDPWithAccelerate.Options().load is module.FEEDING["shard"], "each rank reads where nothing is said"


@pytest.mark.parametrize("loading", ["shard", "dispatch"])
def test_accelerate_reads_what_the_course_reads(script, loading):
    module = script("ddp.with_accelerate")
    way, dataset = module.DDPWithAccelerate.Options(loading=loading).load, Text(16)
    for rank, start in ((0, 0), (1, 2)):
        plan = Plan(5, 12, 41, rank, 2, 3)  # three batches of 12; five examples are left out
        ours, theirs = ([part for step in of(dataset, plan, start) for pair in step for part in pair]
                        for of in (shard, way))  # fmt: skip
        assert len(ours) == len(theirs) == (3 - start) * 3 * 2, "steps of three micro-batches, inputs and targets"
        different = sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert different == 0, f"micro-batches of rank {rank} from step {start} on, not those of --loading shard"
        assert prepare_data_loader.how == {
            "split_batches": True, "dispatch_batches": loading == "dispatch", "put_on_device": True,
            "num_processes": 2, "process_index": rank, "device": torch.device("cpu"),
        }, f"how prepare_data_loader is called, with --loading {loading}"  # fmt: skip


def test_what_fabric_is_asked_for(script, monkeypatch):
    for name, value in (("RANK", 5), ("WORLD_SIZE", 8), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    module = script("ddp.with_fabric")
    for precision, called in (("fp32", "32-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")):
        model = equality.tied(GPT)
        options = module.DDPWithFabric.Options(recompute="full")
        one = module.DDPWithFabric(model, equality.sgd, "mesh", options, precision)
        assert Fabric.settings == {
            "accelerator": "cpu", "devices": 4, "num_nodes": 2, "strategy": {"gradient_as_bucket_view": True},
            "precision": called,
        }, f"Fabric's settings, in {precision}"  # fmt: skip
        assert one.scaler == "the scaler of Fabric's precision", "the scaler that is kept in checkpoints"
        again = [getattr(block.forward, "func", None) is checkpoint for block in model.blocks]
        assert again == [True] * 2, "blocks that are computed again, with --recompute full"
