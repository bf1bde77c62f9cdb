"""The scripts of chapter 06 with Accelerate, DeepSpeed and the Trainer, with stand-ins for the libraries: what each is
asked for, that a step is PyTorch's, and which elements a rank says that it holds. test_engines.py has the
libraries themselves."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from engine_stand_ins import Accelerator, Parts, alone, on_rank_1_of_4, scripts, steps

from common import strategy as contract
from common.errors import UserError
from common.lab import equality
from common.model import GPT
from common.state import interval, whole


@pytest.fixture
def materialised():
    """What has been given rank 0's weights: (model, device, group)."""
    return []


@pytest.fixture
def script(monkeypatch, materialised):
    on_rank_1_of_4(monkeypatch)
    for load in scripts(monkeypatch):

        def module(name, load=load):
            found = load(name)
            monkeypatch.setattr(found, "materialise", lambda *given: materialised.append(given))
            return found

        yield module


def make(cls, **more):
    torch.manual_seed(0)
    return cls(equality.tied(GPT), equality.sgd, "mesh", **more)


def is_of_one_process(strategy, max_norm):
    losses, norms, weights = alone(max_norm)
    found = [tuple(map(float, strategy.step(step))) for step in steps(2, 3)]
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5), "losses of two steps, of three parts each"
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-5), "norms of the gradients before clipping"
    for key, value in weights.items():
        torch.testing.assert_close(strategy.model.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


# --- Accelerate -----------------------------------------------------------------------------------------------

ASKED = {
    "fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"],
    "reshard_after_forward": True, "cpu_offload": False, "cpu_ram_efficient_loading": False,
}  # fmt: skip


def test_what_accelerate_is_asked_for(script, materialised, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    module = script("fsdp.with_accelerate")
    one = make(module.FSDPWithAccelerate, precision="bf16", max_norm=0.3)
    plugin = Accelerator.settings.pop("fsdp_plugin")
    assert plugin.settings == ASKED, "what fully_shard is told, through Accelerate's plugin"
    assert Accelerator.settings == {
        "mixed_precision": "bf16", "cpu": True,
        "gradient_accumulation_plugin": {"num_steps": 1, "sync_with_dataloader": False},
    }, "Accelerator's other settings"  # fmt: skip
    state = one.accelerator.state
    assert (state.distributed_type, state.fsdp_plugin) == ("FSDP", plugin), "on CPUs it has to be told of FSDP"
    assert plugin.mixed_precision == "bf16", "the plugin's precision is that of the run"
    assert materialised == [(one.model, torch.device("cpu"), "the group of four")], "rank 0's weights on each rank"
    assert module.FSDPWithAccelerate.preset == {"shard": -1} and module.FSDPWithAccelerate.from_meta
    make(module.FSDPWithAccelerate, options=module.FSDPWithAccelerate.Options(offload=True))
    plugin = Accelerator.settings["fsdp_plugin"]
    assert plugin.settings["cpu_offload"] is True, "--offload reaches the plugin"
    assert plugin.mixed_precision is None, "in fp32 the plugin keeps its precision"
    config = SimpleNamespace(precision="bf16", options=module.FSDPWithAccelerate.Options(offload=True))
    with pytest.raises(UserError) as error:
        module.FSDPWithAccelerate.require(config, {"shard": 4})
    assert str(error.value) == "--offload: Accelerate takes it on GPUs; without one there is nothing to offload from"
    config.precision = "fp16"
    with pytest.raises(UserError, match="^--precision fp16: Accelerate scales losses on GPUs only; try bf16, or fp32$"):
        module.FSDPWithAccelerate.require(config, {"shard": 4})


def test_accelerate_launch_hands_its_own_settings_over(script, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    make(script("fsdp.with_accelerate").FSDPWithAccelerate)
    assert Accelerator.settings["fsdp_plugin"].settings == {}, "the YAML that `accelerate launch` has read wins"


def test_one_process_and_gpus_need_not_be_told_of_fsdp(script, monkeypatch):
    on_cpu = script("fsdp.with_accelerate").on_cpu
    for processes, device in ((1, "cpu"), (4, "cuda")):
        accelerator = Accelerator()
        accelerator.num_processes, accelerator.device = processes, torch.device(device)
        assert on_cpu(accelerator, "plugin") is accelerator
        state = accelerator.state
        found = state.distributed_type, state.fsdp_plugin
        assert found == ("MULTI_CPU", None), f"{processes} processes on {device}: what Accelerate has found stays"


def test_a_step_with_accelerate_is_that_of_one_process(script, monkeypatch):
    """The norm of sharded gradients is a DTensor."""
    strategy = make(script("fsdp.with_accelerate").FSDPWithAccelerate, max_norm=0.3)
    clip = strategy.accelerator.clip_grad_norm_

    def sharded(*given):
        norm = clip(*given)
        return SimpleNamespace(full_tensor=lambda: norm)

    strategy.accelerator.clip_grad_norm_ = sharded
    is_of_one_process(strategy, 0.3)


# --- DeepSpeed ------------------------------------------------------------------------------------------------


@pytest.fixture
def deepspeed(script, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "unset below, and again after the test")
    monkeypatch.delenv("DS_ACCELERATOR")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield script("fsdp.with_deepspeed")


def test_what_deepspeed_is_told_before_its_parts_are_imported(deepspeed):
    assert Parts.told == ("cpu", {"deepspeed_shm_comm": False}), "the accelerator, and that nothing is to be compiled"
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn("`torch.distributed.reduce_op` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
    told = [str(one.message) for one in shown]
    assert told == ["something else is deprecated"], "what is shown of names that DeepSpeed still uses, and of others"


TOLD = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.3,
    "bf16": {"enabled": False}, "fp16": {"enabled": False}, "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip


def test_what_deepspeed_is_told(deepspeed, materialised, tmp_path):
    three, two, one = (getattr(deepspeed, f"Zero{stage}WithDeepSpeed") for stage in (3, 2, 1))
    strategy = make(three, max_norm=0.3)
    assert strategy.settings() == TOLD, "DeepSpeed's settings"
    assert strategy.engine.config == TOLD, "and initialize gets them"
    assert materialised == [(strategy.model, torch.device("cpu"), "the group of four")], "rank 0's weights on each rank"
    assert {kind.stage: (kind.preset, kind.from_meta) for kind in (three, two, one)} == dict.fromkeys(
        (3, 2, 1), ({"shard": -1}, False)
    ), "stage: the axis, and whether a model on the meta device is taken"
    host, offload = {"device": "cpu"}, three.Options(offload=True)
    offloaded = [make(kind, options=offload).settings()["zero_optimization"] for kind in (three, two)]
    assert offloaded == [
        {"stage": 3, "offload_optimizer": host, "offload_param": host}, {"stage": 2, "offload_optimizer": host},
    ], "--offload: the parameters too, where a rank has a part of them"  # fmt: skip
    for precision in ("bf16", "fp16"):
        found = make(one, precision=precision).settings()
        enabled = {name for name in ("bf16", "fp16") if found[name]["enabled"]}
        assert enabled == {precision}, f"in {precision}"
    assert make(one, max_norm=float("inf")).settings()["gradient_clipping"] == 0.0, "0 is DeepSpeed's word for never"
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}))
    found = make(three, max_norm=0.3, options=three.Options(deepspeed_config=str(file))).settings()
    assert found == TOLD | json.loads(file.read_text()), "the file's settings win over those of the script"


def test_what_deepspeed_cannot_have_gets_one_line(deepspeed, tmp_path):
    cls = deepspeed.Zero3WithDeepSpeed
    resume = SimpleNamespace(resume="newest", options=cls.Options())
    with pytest.raises(UserError) as error:
        cls.require(resume, {"shard": 2})
    line = "--resume: a run is not resumed with DeepSpeed; --implementation pytorch takes it up"
    assert str(error.value) == line
    (tmp_path / "half.json").write_text("{")
    for name, why in (("no", "No such file or directory"), ("half", "Expecting property name")):
        path = tmp_path / f"{name}.json"
        config = SimpleNamespace(resume=None, options=cls.Options(deepspeed_config=str(path)))
        with pytest.raises(UserError, match=f"^--deepspeed-config {path}: .*{why}"):
            cls.require(config, {"shard": 2})
    cls.require(SimpleNamespace(resume=None, options=cls.Options()), {"shard": 2})


@pytest.mark.parametrize("max_norm", [0.3, float("inf")])
def test_a_step_with_deepspeed_is_that_of_one_process(deepspeed, max_norm):
    strategy = make(deepspeed.Zero3WithDeepSpeed, max_norm=max_norm)
    is_of_one_process(strategy, max_norm)
    assert strategy.engine.optimizer.clip_grad == (0.3 if max_norm == 0.3 else 0.0), "0 is DeepSpeed's word for never"


class Tiny(torch.nn.Module):
    """Seven elements, two frozen ones, and a tied weight of four."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.arange(7.0))
        self.frozen = torch.nn.Parameter(torch.tensor([[70.0, 71.0]]), requires_grad=False)
        self.tied = torch.nn.Parameter(torch.arange(4.0).view(2, 2))
        self.again = self.tied


def held(strategy) -> list[tuple]:
    return [
        (part.name, part.tensor.tolist(), part.where, part.owner is None, part.span, part.aliases)
        for part in strategy.parts()
    ]


def test_which_elements_a_rank_of_stage_3_holds(deepspeed, monkeypatch):
    """Seven elements over four ranks: two for each, and the last rank's second fills up."""
    sizes, expected = {"first": 2, "frozen": 1, "tied": 1}, {}
    for rank, (first, frozen, tied) in {1: ((2, 4), (1, 2), (1, 2)), 3: ((6, 7), (2, 2), (3, 4))}.items():
        place = SimpleNamespace(rank=rank, size=4, group=None)
        monkeypatch.setattr(contract.meshes, "axis", lambda mesh, *names, place=place: place)
        model = Tiny()
        strategy = deepspeed.Zero3WithDeepSpeed(model, lambda trained: torch.optim.SGD(trained, lr=1.0), "mesh")
        trained = {*strategy.optimizer.optimizer.param_groups[0]["params"]}
        assert trained == {model.first, model.tied}, "the optimizer gets what is trained, and nothing frozen"
        for name, size in sizes.items():
            parameter = getattr(model, name)
            filled = torch.cat([parameter.detach().flatten(), torch.full((9,), -1.0)])
            parameter.of_this_rank = filled[rank * size : (rank + 1) * size] + 0.5
            local = filled[rank * size : (rank + 1) * size].clone()
            local.ds_numel = size
            parameter.ds_tensor = local
        expected = [
            ("first", [n + 0.5 for n in range(*first)], interval(whole(model.first), *first), False,
             slice(0, first[1] - first[0]), ()),
            ("frozen", [70.0 + n for n in range(*frozen)], interval(whole(model.frozen), *frozen), True,
             slice(0, frozen[1] - frozen[0]), ()),
            ("tied", [n + 0.5 for n in range(*tied)], interval(whole(model.tied), *tied), False, slice(0, 1),
             ("again",)),
        ]  # fmt: skip
        assert held(strategy) == expected, f"name, float32 elements, where, frozen, span, aliases, on rank {rank} of 4"
        flat = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(9), "exp_avg_sq": torch.zeros(9), "name": "flat"}
        strategy.optimizer.optimizer.state = {"one flat tensor": flat, "another": {}}
        found = strategy.optimizer_state()
        assert found.pop(model.frozen) == {}, "the optimizer keeps nothing of what is frozen"
        for parameter in (model.first, model.tied):
            of = {key: value.tolist() for key, value in found.pop(parameter).items()}
            own = parameter.of_this_rank
            assert of == {"step": 3.0, "exp_avg": (own * 10).tolist(), "exp_avg_sq": (own * 100).tolist()}
        assert found == {}


def test_which_elements_a_rank_of_stage_2_holds(deepspeed):
    model = Tiny()
    strategy = deepspeed.Zero2WithDeepSpeed(model, lambda trained: torch.optim.SGD(trained, lr=1.0), "mesh")
    momenta = {"exp_avg": torch.tensor([8.0, 9.0, 10.0])}
    model.tied._hp_mapping = None  # another rank has it
    model.first._hp_mapping = SimpleNamespace(
        lp_fragment_address=SimpleNamespace(start=4, numel=3), get_hp_fragment=lambda: torch.tensor([4.5, 5.5, 6.5]),
        optim_fragment=momenta,
    )  # fmt: skip
    assert held(strategy) == [
        ("first", [4.5, 5.5, 6.5], interval(whole(model.first), 4, 7), False, slice(0, 3), ()),
        ("frozen", [70.0, 71.0], whole(model.frozen), True, None, ()),
    ], "name, float32 elements, where, frozen, span, aliases"
    strategy.optimizer.optimizer.state = {"flat": {"step": torch.tensor(3.0), "exp_avg": torch.zeros(9), "name": "f"}}
    for kept in (momenta, None):  # None: before the first step
        model.first._hp_mapping.optim_fragment = kept
        found = [(parameter is model.first, {**state}) for parameter, state in strategy.optimizer_state().items()]
        assert found == [(True, {"step": torch.tensor(3.0)} | (kept or {}))], "the optimizer's scalars and its piece"
