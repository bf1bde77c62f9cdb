"""Every option reaches its strategy: each is set on the command line, the chapter's real main trains, and what the
option should change is looked at: an attribute, what was called, a number that must differ.

Expectations are literals, not what the code under test says of itself.
"""

import functools

import pytest
import torch
from helpers import SMALL, configure, numbers

from common.config import shared
from common.lab.guard import CheckCollectives
from common.lab.launch import launch
from common.run import Run
from course.strategies import STRATEGIES, load

KINDS = [(name, kind) for name, entry in STRATEGIES.items() if name != "mesh" for kind in entry().implementations]
SIZES = {"single": 1, "dp": 1, "hsdp": 4, "tensor+fsdp": 4, "pipeline+ddp": 2, "pipeline+fsdp": 2}


def size_of(name, kind):
    """Ranks on which the strategy is more than one process, where it can be."""
    return 1 if (name, kind) == ("model", "pytorch") else SIZES.get(name, 2)


def observe(configs, look=lambda run, seen: None):
    """On a rank: train as the scripts do; for each configuration what was seen, with `look` at the run at its end.

    `look` is called inside the run, when its first step has been done."""
    observations = []
    for config in configs:
        seen = {}
        original = Run.log, Run.batches

        def log(run, step, loss, grad_norm, seen=seen, original=original):
            original[0](run, step, loss, grad_norm)
            if not step:
                seen["looked"] = look(run, seen)
                seen["rates"] = []
                seen["steps"] = []
            seen["rates"].append(run.strategy.optimizer.param_groups[0]["lr"])
            seen["steps"].append(step)

        def batches(run, *load, seen=seen, original=original):
            seen["load"] = load[0].__name__ if load else "shard"
            step = run.strategy.step

            def counted(micro_batches):
                seen["micro_batches"] = [tuple(inputs.shape) for inputs, _ in micro_batches]
                seen["guard"] = any(isinstance(mode, CheckCollectives) for mode in modes())
                seen["threads"] = torch.get_num_threads()
                return step(micro_batches)

            run.strategy.step = counted
            return original[1](run, *load)

        Run.log, Run.batches = log, batches
        try:
            config.entry.main(config)
        finally:
            Run.log, Run.batches = original
        observations.append(seen)
    return observations


def modes():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def optimizer_of(run, seen):
    """The optimizer's class and what it was told; and whose weights there are."""
    optimizer = run.strategy.optimizer
    optimizer = getattr(optimizer, "optim", optimizer)  # inside of a ZeroRedundancyOptimizer
    group = optimizer.param_groups[0]
    told = {key: group[key] for key in ("momentum", "betas", "weight_decay") if key in group}
    return type(optimizer).__name__, told


BASE = SMALL | {"steps": 2, "checkpoint_every": 0, "layers": 4, "batch_size": 24}
# What each of the run's options changes, where every strategy trains: the option, and what must differ from BASE.
VARIANTS = {
    "precision": {"precision": "bf16"},
    "seed": {"seed": 5},
    "optimizer": {"optimizer": "sgd"},
    "lr": {"lr": 0.01},
    "accumulation_steps": {"accumulation_steps": 3},
    "check_collectives": {"check_collectives": True},
}


@pytest.mark.parametrize("name, kind", KINDS)
def test_the_runs_options_reach_every_strategy(name, kind, tmp_path):
    size = size_of(name, kind)
    common = {"strategy": name, "implementation": kind, **BASE, **({"microbatches": 2} if "pipeline" in name else {})}
    configs = {
        option: configure(size=size, run_dir=tmp_path / option, **common | settings)
        for option, settings in {"base": {}, **VARIANTS}.items()
    }
    ranks = launch(functools.partial(observe, look=optimizer_of), size, (list(configs.values()),), timeout=180)
    seen = dict(zip(configs, ranks[-1], strict=True))
    got = {option: numbers(tmp_path / option) for option in configs}
    base, half = got["base"], got["precision"]
    assert half == pytest.approx(base, rel=5e-2) and half[0] != base[0], "--precision bf16: as near, and not the same"
    assert got["seed"][0] != base[0], "--seed: other weights, other data"
    assert seen["base"]["looked"] == ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.1})
    sgd, told = seen["optimizer"]["looked"]
    assert (sgd, told["momentum"], told["weight_decay"]) == ("SGD", 0.9, 0)
    assert seen["base"]["rates"] == pytest.approx([0.0001, 0.0002]), "2e-3 after 20 steps of warm-up"
    assert seen["lr"]["rates"] == pytest.approx([0.0005, 0.0010])
    (whole,), parts = seen["base"]["micro_batches"], seen["accumulation_steps"]["micro_batches"]
    assert parts == [(whole[0] // 3, *whole[1:])] * 3, "--accumulation-steps 3: three micro-batches"
    assert got["accumulation_steps"] == pytest.approx(base, rel=1e-4)
    assert (seen["base"]["guard"], seen["check_collectives"]["guard"]) == (False, True)
    assert seen["base"]["threads"] == 1


def shape_of(run, seen):
    model = run.strategy.model
    return len(model.blocks), tuple(model.embedding.positions.weight.shape), model.blocks[0].attention.heads


def test_the_models_options_and_the_datas(tmp_path):
    line = "--layers 3 --width 48 --heads 6 --context 8 --batch-size 10 --steps 3 --checkpoint-every 2 --log-every 1"
    config = configure(line, strategy="single", run_dir=tmp_path / "run")
    ((seen,),) = launch(functools.partial(observe, look=shape_of), 1, ([config],))
    assert seen["looked"] == (3, (8, 48), 6)
    assert seen["micro_batches"] == [(10, 8)] and seen["steps"] == [0, 1, 2]
    assert sorted(path.name[11:17] for path in (tmp_path / "run").glob("*.pt")) == ["000002", "000003"]


def test_two_seeds_give_other_weights_and_other_data(tmp_path):
    def first(run, seen):
        inputs, _ = next(iter(run.task.micro_batches(0, run.strategy)))
        torch.manual_seed(0)
        return run.task.make_model().embedding.tokens.weight.sum().item(), inputs[0].tolist()

    configs = [configure(strategy="single", run_dir=tmp_path / str(s), seed=s, **BASE) for s in (0, 5)]
    ((one, other),) = launch(functools.partial(observe, look=first), 1, (configs,))
    assert one["looked"][0] != other["looked"][0], "weights"
    assert one["looked"][1] != other["looked"][1], "data"


# --- the strategies' own options ------------------------------------------------------------------------------


def blocks_recompute(run, seen):
    return "checkpoint" in repr(run.strategy.model.blocks[0].forward)


def stages_recompute(run, seen):
    strategy = run.strategy
    if hasattr(strategy, "own"):  # PyTorch's stages
        return all(module.recompute for stage in strategy.own for module in stage.submod.modules() if is_stage(module))
    return strategy.executor.recompute


def is_stage(module):
    from course.pipeline.distributed_training import Stage

    return isinstance(module, Stage)


def offloaded(run, seen):
    from torch.distributed.fsdp import CPUOffloadPolicy

    state = run.strategy.model.blocks[0]._get_fsdp_state()
    return isinstance(state._fsdp_param_group.offload_policy, CPUOffloadPolicy)


def schedule_of(run, seen):
    executor = run.strategy.executor
    if hasattr(executor, "actions"):
        return [str(action.kind) for action in executor.actions if not action.kind.startswith(("SEND", "RECV"))]
    return type(executor).__name__


def cuts(run, seen):
    return [list(run.strategy.stages.names[number]) for number in sorted(run.strategy.stages.modules)]


def microbatches_of(run, seen):
    executor = run.strategy.executor
    if hasattr(executor, "actions"):
        return sum(action.kind == "F" for action in executor.actions)
    return executor._n_microbatches


def load_of(run, seen):
    return seen["load"]


def mixture_of(run, seen):
    mixture = run.strategy.model.blocks[0].mlp
    return mixture.number, mixture.top_k


def is_pipeline(name, kind):
    return "pipeline" in load(name, kind).preset and "schedule" in load(name, kind).Options.__dataclass_fields__


# option -> (what is set, look, what is seen by default, what is seen then); a function of (name, kind) where it depends
OWN = {
    "recompute": lambda name, kind: (
        {"recompute": "full"}, stages_recompute if is_pipeline(name, kind) else blocks_recompute, False, True
    ),
    "offload": lambda name, kind: ({"offload": True}, offloaded, False, True),
    "loading": lambda name, kind: ({"loading": "dispatch"}, load_of, "shard", "dispatch"),
    "experts": lambda name, kind: ({"experts": 4}, mixture_of, (8, 2), (4, 2)),
    "top_k": lambda name, kind: ({"top_k": 3}, mixture_of, (8, 2), (8, 3)),
    "microbatches": lambda name, kind: ({"microbatches": 6, "schedule": "1f1b"}, microbatches_of, 4, 6),
    "schedule": lambda name, kind: (
        {"schedule": "gpipe"},
        schedule_of,
        *(("Schedule1F1B", "ScheduleGPipe") if kind == "pytorch" else (["F", "B"] * 4, ["F"] * 4 + ["B"] * 4)),
    ),
    "stages_per_rank": lambda name, kind: (
        {"schedule": "interleaved", "stages_per_rank": 3}, lambda run, seen: len(cuts(run, seen)), 1, 3
    ),
    "split_spec": lambda name, kind: (
        {"split_spec": "blocks.0:end"}, cuts, None, [["blocks.1", "blocks.2", "blocks.3", "head"]]
    ),
}  # fmt: skip
ELSEWHERE = {"find_batch_size", "memory_budget"}  # they print and train nothing: tests/test_sharding.py
# DDP in a pipeline knows the schedule 1f1b only, with one stage on each rank: tests/test_cli.py
REFUSED = {("pipeline+ddp", "pytorch", "schedule"), ("pipeline+ddp", "pytorch", "stages_per_rank")}
CASES = [
    (name, kind, option)
    for name, kind in KINDS
    for option in load(name, kind).Options.__dataclass_fields__
    if option not in ELSEWHERE and (name, kind, option) not in REFUSED
]


@pytest.mark.parametrize("name, kind, option", CASES)
def test_a_strategys_option_reaches_it(name, kind, option, tmp_path):
    settings, look, default, then = OWN[option](name, kind)
    size = 4 if "+" in name or name == "hsdp" else 2
    if name == "single":
        size = 1
    both = [
        configure(size=size, strategy=name, implementation=kind, run_dir=tmp_path / str(number), **BASE | more)
        for number, more in enumerate(({}, settings))
    ]
    before, after = launch(functools.partial(observe, look=look), size, (both,), timeout=180)[-1]
    if default is None:
        assert before["looked"] != then
    else:
        assert before["looked"] == default
    assert after["looked"] == then


def test_every_option_is_tested():
    own = {option for _, _, option in CASES} | ELSEWHERE
    assert own == {o for name, kind in KINDS for o in load(name, kind).Options.__dataclass_fields__}
    elsewhere = {  # where the run's options are tested that VARIANTS doesn't have
        "strategy", "implementation", "by_hand", "mesh", "mesh_order", "distributed", "backend", "device", "resume",
        "run_dir", "task", "dataset", "data_dir", "download",
    }  # fmt: skip
    here = {"steps", "checkpoint_every", "log_every", "layers", "width", "heads", "context", "batch_size"}
    assert {item.name for item in shared()} == elsewhere | here | set(VARIANTS)
