"""Every option reaches its strategy: each is set on the command line, the chapter's real main trains, and what the
option should change is looked at: an attribute, what was called, a number that must differ.

Expectations are literals, not what the code under test says of itself.
"""

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, SMALL, configure, do_not_draw, numbers
from torch.distributed.tensor import DTensor

from common import manifest
from common.keeper import Keeper
from common.lab.guard import CheckCollectives
from common.lab.launch import launch
from common.mesh import make_mesh
from common.run import Run
from common.task import make_task
from course.strategies import STRATEGIES, load

KINDS = [(name, kind) for name, entry in STRATEGIES.items() if name != "mesh" for kind in entry.implementations]
SIZES = {"single": 1, "dp": 1}


def size_of(name, kind):
    """Ranks on which the strategy is more than one process, where it can be."""
    return 1 if (name, kind) == ("model", "pytorch") else SIZES.get(name, 2)


def observe(configs, looks):
    """On a rank: train as the scripts do; for each configuration what was seen, and what its function in `looks`
    returned, which is called inside the run, when its first step has been done."""
    do_not_draw()
    if not any(config.checkpoint_every for config in configs):
        Keeper.save = lambda keeper, done: None  # this process ends here; test_checkpoint.py saves every strategy
    observations = []
    for config, look in zip(configs, looks, strict=True):
        seen = {}
        original = Run.end_step, Run.batches

        def end_step(run, loss, grad_norm, seen=seen, original=original, look=look):
            step, stopping = run.progress.done, original[0](run, loss, grad_norm)
            if not step:
                seen["looked"] = look(run, seen)
                seen["rates"] = []
                seen["steps"] = []
                optimizer = getattr(run.strategy.optimizer, "optim", run.strategy.optimizer)  # ZeroRedundancyOptimizer
                told = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
                seen["optimizer"] = type(optimizer).__name__, told
            seen["rates"].append(run.strategy.optimizer.param_groups[0]["lr"])
            seen["steps"].append(step)
            return stopping

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

        Run.end_step, Run.batches = end_step, batches
        try:
            config.main(config)
        finally:
            Run.end_step, Run.batches = original
        observations.append(seen)
    return observations


def modes():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def optimizer_of(seen):
    """The optimizer's class and what it was told."""
    name, group = seen["optimizer"]
    return name, {key: group[key] for key in ("momentum", "betas", "weight_decay") if key in group}


BASE = SMALL | {"steps": 1, "checkpoint_every": 0, "batch_size": 24}
# What the run's options change, where every strategy trains, and what must differ from BASE; each of them shows in
# something else (--precision: test_half_precision.py, test_bf16_errors.py).
VARIANT = {"seed": 5, "optimizer": "sgd", "lr": 0.01, "accumulation_steps": 3, "check_collectives": True}


def check_the_runs_options(base: dict, other: dict, who: str) -> None:
    """What was seen in a run with BASE, and in one with VARIANT."""
    assert optimizer_of(base) == ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.1}), who
    assert optimizer_of(other) == ("SGD", {"momentum": 0.9, "weight_decay": 0}), f"{who}: --optimizer sgd"
    assert base["rates"] == pytest.approx([0.0001]), "2e-3 after 20 steps of warm-up"
    assert other["rates"] == pytest.approx([0.0005]), f"{who}: --lr"
    (whole,), parts = base["micro_batches"], other["micro_batches"]
    assert parts == [(whole[0] // 3, *whole[1:])] * 3, f"{who}: --accumulation-steps 3: three micro-batches"
    assert (base["guard"], other["guard"]) == (False, True), f"{who}: --check-collectives"
    assert base["threads"] == 1, who


def shape_of(run, seen):
    model = run.strategy.model
    return len(model.blocks), tuple(model.embedding.positions.weight.shape), model.blocks[0].attention.heads


def test_the_models_options_and_the_datas(tmp_path):
    line = "--layers 3 --width 48 --heads 6 --context 8 --batch-size 10 --steps 5 --checkpoint-every 2 --log-every 1"
    config = configure(line, strategy="single", run_dir=tmp_path / "run")
    three = configure(f"{line} --keep 3", strategy="single", run_dir=tmp_path / "three")
    ((seen, _),) = launch(observe, 1, ([config, three], [shape_of] * 2))
    assert seen["looked"] == (3, (8, 48), 6)
    assert seen["micro_batches"] == [(10, 8)] and seen["steps"] == [0, 1, 2, 3, 4]
    assert [manifest.step_of(path) for path in manifest.checkpoints(tmp_path / "run")] == [4, 5]
    assert [manifest.step_of(path) for path in manifest.checkpoints(tmp_path / "three")] == [2, 4, 5]


# --- the strategies' own options ------------------------------------------------------------------------------


def offloaded(run, seen):
    from torch.distributed.fsdp import CPUOffloadPolicy

    state = run.strategy.model.blocks[0]._get_fsdp_state()
    return isinstance(state._fsdp_param_group.offload_policy, CPUOffloadPolicy)


def schedule_of(run, seen):
    if hasattr(run.strategy, "own"):
        return type(run.strategy.schedule).__name__
    actions = run.strategy.executor.actions
    return [str(action.kind) for action in actions if not action.kind.startswith(("SEND", "RECV"))]


def cuts(run, seen):
    return [list(run.strategy.stages.names[number]) for number in sorted(run.strategy.stages.modules)]


def microbatches_of(run, seen):
    if hasattr(run.strategy, "own"):
        return run.strategy.schedule._n_microbatches
    return sum(action.kind == "F" for action in run.strategy.executor.actions)


def load_of(run, seen):
    return seen["load"]


# option -> (what is set, look, what is seen by default, what is seen then); a function of (name, kind) where it depends
OWN = {
    "offload": lambda name, kind: ({"offload": True}, offloaded, False, True),
    "loading": lambda name, kind: ({"loading": "dispatch"}, load_of, "shard", "dispatch"),
    "experts": lambda name, kind: ({"experts": 4}, lambda run, seen: run.strategy.model.blocks[0].mlp.number, 8, 4),
    "top_k": lambda name, kind: ({"top_k": 3}, lambda run, seen: run.strategy.model.blocks[0].mlp.top_k, 2, 3),
    "microbatches": lambda name, kind: ({"microbatches": 8}, microbatches_of, 4, 8),
    "schedule": lambda name, kind: (
        {"schedule": "gpipe"},
        schedule_of,
        *(("Schedule1F1B", "ScheduleGPipe") if kind == "pytorch" else (["F", "B"] * 4, ["F"] * 8 + ["B"] * 8)),
    ),
    "stages_per_rank": lambda name, kind: (
        {"schedule": "interleaved", "stages_per_rank": 3}, lambda run, seen: len(cuts(run, seen)), 1, 3
    ),
    "split_spec": lambda name, kind: (
        {"split_spec": "blocks.0:end"}, cuts, None, [["blocks.1", "blocks.2", "blocks.3", "head"]]
    ),
}  # fmt: skip
# They print and train nothing: tests/strategies/test_sharding.py; and below.
ELSEWHERE = {"find_batch_size", "memory_budget", "recompute"}
# DDP in a pipeline knows the schedule 1f1b only, with one stage on each rank: test_chapter_messages.py
REFUSED = {("pipeline+ddp", "pytorch", "schedule"), ("pipeline+ddp", "pytorch", "stages_per_rank")}
CASES = {
    (name, kind): [
        option
        for option in load(name, kind).Options.__dataclass_fields__
        if option not in ELSEWHERE and (name, kind, option) not in REFUSED
    ]
    for name, kind in KINDS
}


@pytest.mark.parametrize("size", (1, 2))
def test_options_reach_every_strategy(size, tmp_path):
    """In one launch: a run with other values of all options, and one with the defaults for each class of options. One
    strategy of a chapter shows it for those with the same class, whose main is the same; with FULL=1 each does."""
    plans, looked_at, alike = [], set(), set()
    for name, kind in KINDS:
        options = load(name, kind).Options
        same = STRATEGIES[name].chapter, kind, options
        if size_of(name, kind) == size and (FULL or same not in alike):
            alike.add(same)
            plans.append(planned(name, kind, size, tmp_path / f"{name}-{kind}", FULL or options not in looked_at))
            looked_at.add(options)
    configs, looks = ([one for plan in plans for one in plan[part].values()] for part in (0, 1))
    rest, base = iter(launch(observe, size, (configs, looks), timeout=1800)[-1]), None
    for configs, _, check in plans:
        seen = {run: next(rest) for run in configs}
        base = seen.get("base", base)
        check(seen)
        check_the_runs_options(base, seen["other"], "")
    folder = tmp_path / "-".join(KINDS[0] if size == 1 else ("ddp", "pytorch"))
    assert numbers(folder / "base")[0] != numbers(folder / "other")[0], "--seed: other weights, other data"


ALONE = ("stages_per_rank",)  # it wants a schedule of its own


def planned(name, kind, size, folder, base: bool) -> tuple:
    """The runs of a strategy, where to look in each, and what to ask of what was seen."""
    own = {option: OWN[option](name, kind) for option in CASES[name, kind]}
    more = {"layers": 4} if "pipeline" in name else {}
    if name in ("pipeline+ddp", "pipeline+fsdp"):
        more["mesh"] = f"pipeline=2,{'data' if name == 'pipeline+ddp' else 'shard'}=1"
    groups = {"base": []} if base else {}
    groups |= {"other": [option for option in own if option not in ALONE]}
    groups |= {option: [option] for option in own if option in ALONE}
    settings = {run: dict(more) for run in groups}
    settings["other"] |= VARIANT | ({"microbatches": 8} if "microbatches" in own else {})
    for run, options in groups.items():
        for option in options:
            settings[run] |= own[option][0]

    def look_for(options):
        return lambda run, seen: {option: own[option][1](run, seen) for option in options}

    common = BASE | {"strategy": name, "implementation": kind}
    configs = {run: configure(size=size, run_dir=folder / run, **common | changed) for run, changed in settings.items()}
    looks = {run: look_for(options or own) for run, options in groups.items()}

    def check(seen):
        for run, options in groups.items():
            for option in options:
                _, _, default, then = own[option]
                who, found = f"{name}, {kind}: {option}", seen[run]["looked"][option]
                assert found == then, who
                if base:
                    before = seen["base"]["looked"][option]
                    assert before != then if default is None else before == default, who

    return configs, looks, check


def test_every_option_of_a_strategy_is_tested():
    own = {option for options in CASES.values() for option in options} | ELSEWHERE
    assert own == {o for name, kind in KINDS for o in load(name, kind).Options.__dataclass_fields__}


# --- what is computed again -------------------------------------------------------------------------------------

RECOMPUTING = [(name, kind) for name, kind in [*KINDS, ("mesh", "by-hand"), ("mesh", "pytorch")]
               if "recompute" in load(name, kind).Options.__dataclass_fields__]  # fmt: skip


def computed(configs) -> list[tuple]:
    """On a rank: how often layers of blocks, of which something drops out, compute in a second step; its gradient's
    norm; and what is drawn next."""
    found, times = [], []

    def drop(layer, args, output):
        times.append(1)
        return output if isinstance(output, DTensor) else torch.nn.functional.dropout(output, 0.2)

    for config in configs:
        task, mesh = make_task(config), make_mesh(config.axes, "cpu")
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        for layer in strategy.model.blocks.modules():
            if isinstance(layer, torch.nn.LayerNorm):
                layer.register_forward_hook(drop)
        torch.manual_seed(dist.get_rank())
        strategy.step(task.micro_batches(0, strategy))
        times.clear()
        norm = float(strategy.step(task.micro_batches(0, strategy))[1])
        found.append((len(times), norm, float(torch.rand(()))))
    return found


@pytest.mark.parametrize("size", (1, 2))
def test_every_strategy_computes_again_what_it_is_told_to_with_the_same_numbers(size, tmp_path):
    """On one rank; the stages of a mesh on two."""
    rows = RECOMPUTING if size == 1 else [("mesh", kind) for kind in ("by-hand", "pytorch")]
    configs, who = [], []
    for name, kind in rows:
        axes = {"pipeline": 2} if size == 2 else dict.fromkeys(load(name, kind).preset, 1)
        mesh = ",".join(f"{axis}={n}" for axis, n in axes.items())
        for what in ("none", "full"):
            line = f"--strategy {name} --implementation {kind} --recompute {what} --accumulation-steps 2"
            if (name, kind) == ("pipeline", "by-hand"):  # of its two stages the first computes again as the last
                line += " --schedule zbv"
            configs.append(configure(line, size, **BASE | {"mesh": mesh, "run_dir": tmp_path / "run"}))
            who.append((name, kind, what))
    for found in launch(computed, size, (configs,), timeout=300):
        once: dict[str, tuple] = {}
        for (name, kind, what), (times, *seen) in zip(who, found, strict=True):
            plain, *expected = once.setdefault(f"{name} {kind}", (times, *seen))
            assert times == plain * (1 + (what != "none")) > 0, f"{name}, {kind}, --recompute {what}"
            assert seen == pytest.approx(expected, rel=1e-5), f"{name}, {kind}, --recompute {what}"
