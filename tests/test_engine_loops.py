"""The loops of Accelerate's and Fabric's scripts, with stand-ins for the libraries that do what their documentation
says: what each is asked for, and that a step is PyTorch's. tests/test_engines.py has the libraries themselves."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from common import strategy as contract
from common.data import Plan, Text, shard
from common.errors import UserError
from common.lab import equality
from common.model import GPT, cross_entropy


class Optimizer:
    """Steps, and forgets gradients, when `last()` says that gradients are whole."""

    def __init__(self, optimizer, last=lambda: True):
        self.optimizer, self.last = optimizer, last
        self.param_groups = optimizer.param_groups

    def step(self):
        if self.last():
            self.optimizer.step()

    def zero_grad(self):
        if self.last():
            self.optimizer.zero_grad()


class Library:
    """What both have in common: it notes the settings that it is given, and what it is asked to do."""

    scaler = None

    def __init__(self, **settings):
        type(self).settings, self.inside, self.reduced = settings, False, []
        self.synchronised = []  # for each micro-batch: whether its gradients are sent

    @contextmanager
    def autocast(self):
        self.inside = True
        yield
        self.inside = False

    def reduce(self, loss, reduction):
        self.reduced.append(reduction)
        return loss


class Accelerator(Library):
    gradient_accumulation_steps = 1
    passes = 0

    def prepare(self, model, optimizer):
        model.register_forward_pre_hook(lambda *_: self.outside.append(not self.inside))
        self.outside = []
        return model, Optimizer(optimizer, lambda: self.sync_gradients)

    @contextmanager
    def accumulate(self, model):
        self.passes += 1
        self.sync_gradients = self.passes % self.gradient_accumulation_steps == 0
        self.synchronised.append(self.sync_gradients)
        yield

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()

    def clip_grad_norm_(self, parameters, max_norm):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


class Fabric(Library):
    launched = False
    _precision = SimpleNamespace(scaler="the scaler of Fabric's precision")

    def launch(self):
        self.launched = True

    def setup(self, model, optimizer):
        assert self.launched, "Fabric is set up before it is launched"
        return model, Optimizer(optimizer)

    @contextmanager
    def no_backward_sync(self, model, enabled):
        self.synchronised.append(not enabled)
        yield

    def backward(self, loss):
        loss.backward()

    def clip_gradients(self, model, optimizer, max_norm):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def all_reduce(self, loss, reduce_op):
        return self.reduce(loss, reduce_op)


def prepare_data_loader(loader, device, **how):
    """The slices that a process gets of each batch."""
    prepare_data_loader.how = how | {"device": device}
    assert how["split_batches"], "a batch of the loader is the global one"
    for batch in loader:
        yield tuple(part.chunk(how["num_processes"])[how["process_index"]] for part in batch)


@pytest.fixture
def script(monkeypatch):
    """Imports a script with the stand-ins in place of its library."""

    def module(name, **names):
        found = ModuleType(name)
        vars(found).update(names)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    def settings(**given):
        return given

    module("accelerate", Accelerator=Accelerator)
    module("accelerate.data_loader", prepare_data_loader=prepare_data_loader)
    module("accelerate.utils", GradientAccumulationPlugin=settings)
    module("lightning")
    module("lightning.fabric", Fabric=Fabric)
    module("lightning.fabric.strategies", DDPStrategy=settings)
    everyone = SimpleNamespace(rank=1, size=4, group=None)
    meshes = SimpleNamespace(device_of=lambda mesh: torch.device("cpu"), axis=lambda mesh, *names: everyone)
    monkeypatch.setattr(contract, "meshes", meshes)
    monkeypatch.setattr("course.ddp.options.axis", meshes.axis)
    for name in ("with_accelerate", "with_fabric"):
        monkeypatch.delitem(sys.modules, f"course.ddp.{name}", raising=False)
    yield lambda name: importlib.import_module(f"course.ddp.{name}")
    for name in ("with_accelerate", "with_fabric"):
        sys.modules.pop(f"course.ddp.{name}", None)


def steps(number: int, count: int) -> list:
    tokens = torch.randint(64, (number, count, 4, 9), generator=torch.Generator().manual_seed(0))
    return [[(part[:, :-1], part[:, 1:]) for part in step] for step in tokens]


def alone(max_norm: float) -> tuple[list[float], list[float], dict]:
    """Two steps of three micro-batches, as one process does them on whole batches: losses, norms, weights."""
    torch.manual_seed(0)
    model, losses, norms = equality.tied(GPT), [], []
    optimizer = equality.sgd(model.parameters())
    for step in steps(2, 3):
        inputs, targets = (torch.cat(parts) for parts in zip(*step, strict=True))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("name, cls", [("with_accelerate", "DDPWithAccelerate"), ("with_fabric", "DDPWithFabric")])
def test_a_step_is_that_of_one_process(script, name, cls):
    losses, norms, weights = alone(0.3)
    torch.manual_seed(0)
    strategy = getattr(script(name), cls)(equality.tied(GPT), equality.sgd, "mesh", max_norm=0.3)
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
    module = script("with_accelerate")
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
    module = script("with_accelerate")
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
    module = script("with_fabric")
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
