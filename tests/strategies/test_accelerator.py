"""Every strategy takes two steps on accelerators that are not there (common/lab/fake_accelerator.py), and keeps its
word: no operation mixes devices, nothing but what is listed is sent from the CPU, no device ever holds more bytes than
a formula says, and the host waits for the device as often as is stated. Mistakes of each of these kinds are refused."""

import contextlib
import functools
import re
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerator_cases import CASES, CONTEXT, ONE_PROCESS, VOCABULARY, WEEKLY, WIDTH, Case, settings, sizes
from helpers import FULL
from strategy_memory import stated

from common import ROOT
from common.lab.bugs import Bug, Bugs
from common.lab.launch import ready_to_fork
from common.strategy import Setup
from common.task import Task
from course.strategies import STRATEGIES

# How often the host waits for the device for each micro-batch; where nothing is said, never.
WAITS = {
    # The lengths of what is sent, received and computed, once for each layer (of which there is one here).
    ("expert", "by-hand"): {"tolist": 1},
}
# In the first step PyTorch's stages agree on whether shapes are known, and tell each other.
PIPELINES = ("pipeline", "pipeline+ddp", "pipeline+fsdp", "mesh")
FIRST_STEP = {(name, "pytorch"): {"copy to the device": 1, "item": 1} for name in PIPELINES}
# In fp16: GradScaler asks whether gradients overflowed, on every device, and a pipeline for the scale, in every pass.
FP16 = {
    ("single", "pytorch"): lambda micro_batches: 1,
    ("ddp", "by-hand"): lambda micro_batches: 1,
    ("model", "pytorch"): lambda micro_batches: 4,
    ("fsdp", "by-hand"): lambda micro_batches: 1,
    ("pipeline", "by-hand"): lambda micro_batches: 1 + micro_batches,
}

# Functions that send tensors of the CPU, and why; only in construction.
FROM_CPU = {
    "broadcast_together": "the model is on the CPU until a rank has cut its own part out of it",
    "same_on_all_ranks": "names and shapes of the parameters, as objects",
}


def mistake(target: str, file: str, inside: str, right: str, wrong: str) -> Bug:
    return Bug(target, right, wrong, refused_by="see PLANTED", why="", inside=inside, file=file)


def in_the_loop(wrong: str) -> Bug:
    return mistake("DDPByHand", "by_hand.py", "step", "loss += part.detach()", wrong)


# Mistakes of each kind: whose code, the mistake, and the line that refuses it.
PLANTED = {
    "stray_cpu": (
        ("ddp", "by-hand"),
        in_the_loop("loss += part.detach()\n            part.cpu()"),
        r"^step 2: the host waits .* 2 times and not 0 times for 'copy to the host': <stray_cpu>:\d+ step \(2\)$",
    ),
    "loss_on_the_cpu": (
        ("ddp", "by-hand"),
        in_the_loop("loss += part.detach().cpu()"),
        r"^step 1: allreduce_ carries tensors of the cpu, 1 times, at <loss_on_the_cpu>:\d+ step$",
    ),
    "loss_begun_on_the_cpu": (
        ("model", "by-hand"),
        mistake("SplitLayers", "by_hand_layers.py", "step", "torch.zeros((), device=self.device)", "torch.zeros(())"),
        r"^aten\.add_ mixes tensors of the cpu and of the gpu at <loss_begun_on_the_cpu>:\d+ step$",
    ),
    "moved_before_it_is_cut": (
        ("tensor", "by-hand"),
        mistake(
            "TensorParallelByHand",
            "by_hand_tensor.py",
            "TensorParallelByHand",
            "apply_tensor_parallel(model,",
            "apply_tensor_parallel(model.to(self.device),",
        ),
        r"^construction: more than [\d,]+ bytes \([\d,]+ parameters, [\d,]+ single numbers\): [\d,]+ on gpu:0 at "
        r"<moved_before_it_is_cut>:\d+ __init__, which are [\d,]+ of _to_copy at <moved_before_it_is_cut>:\d+ __init__",
    ),
    "gradients_stay_whole": (
        ("zero2", "by-hand"),
        mistake(
            "Zero2ByHand",
            "by_hand_zero23.py",
            "finish_reduce",
            "flat.gradient = flat.gradient_of = self.under_way = None",
            "self.under_way = None",
        ),
        r"^step [12]: more than .* bytes .* of zeros at by_hand_zero1\.py:\d+ allocate_gradient",
    ),
}


# --- the runs -----------------------------------------------------------------------------------------------------


def small(config, tokens: int) -> dict[str, int]:
    """Bytes beside the states: at most 40 numbers of the width for each token in a block, and 10 of the vocabulary's
    size; the gradients that a tied weight gets at its two places, and their sum."""
    activations = 4 * tokens * (40 * config.layers * WIDTH + 10 * VOCABULARY)
    return {"activations": activations, "gradients of the ends": 3 * 4 * VOCABULARY * WIDTH}


def examine(case: Case, planted: str = "", precision: str = "fp32"):
    """Construct a strategy and take two steps, of one micro-batch and of two; in a process of its own.

    Returns the phases, the states that the strategy says there are in each, and the refusals."""
    from common.lab.fake_accelerator import Refused, pretend
    from common.lab.fake_stand_ins import register
    from course.data_parallel import by_hand as data_parallel

    warnings.filterwarnings("ignore", "PyTorch is not compiled with NCCL support")
    config, alone, extra = settings(case), case.who in ONE_PROCESS, {}
    cls, chapter = config.strategy_class, STRATEGIES[case.strategy].chapter
    if planted:
        cls = Bugs(str(ROOT / chapter / "classroom" / "bugs.py"), {planted: PLANTED[planted][1]}).plant(planted)
    rank, size, devices = (0, 1, case.size) if alone else (case.rank, case.size, 1)
    register(devices)  # before there is a device of that name
    gpus = [torch.device("gpu", number) for number in range(devices)] if alone else []
    if alone and case.who != ("dp", "pytorch"):
        extra["devices"] = gpus
    time = CONTEXT if case.strategy in ("context", "ulysses", "sequence") else 1
    examples = getattr(config.options, "microbatches", 1 if time > 1 else case.size)
    says = [max(moments, key=lambda moment: sum(moment.values())) for moments in stated(sizes(case))]
    says, more = [*says, says[1]], small(config, examples * time)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(data_parallel, "devices_of", lambda mesh: gpus))
        mesh, watch = stack.enter_context(pretend(config.axes, rank, size, devices, (1, time, WIDTH)))
        with torch.device("meta" if cls.from_meta and rank > 0 else "cpu"):
            model = cls.make_model(config)
        phases = [watch.begin("construction", says[0] | {"single numbers": 1024})]
        strategy = cls(model, Task(None, config).make_optimizer, Setup(mesh, config.options, precision), **extra)
        refusals = phases[0].refusals(from_host=FROM_CPU)
        for number in (1, 2):
            phases.append(watch.begin(f"step {number}", says[number] | more))
            tokens = torch.zeros(examples, time, dtype=torch.long, device="gpu")
            try:
                strategy.step([(tokens, tokens.clone()) for _ in range(number)])
            except Refused as refused:
                return phases, says, [*refusals, str(refused)]
            waits = Counter({kind: number * times for kind, times in WAITS.get(case.who, {}).items()})
            waits.update(FIRST_STEP.get(case.who, {}) if number == 1 and "pipeline" in config.axes else {})
            waits.update(item=FP16[case.who](number) if precision == "fp16" else 0)
            refusals += phases[-1].refusals(waits)
    return phases, says, refusals


@pytest.fixture(scope="module")
def elsewhere():
    """Calls a function in one process for all of these tests, since they change PyTorch for good."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("fork")) as pool:
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        with ready_to_fork():  # else it dies, if it collects what other tests have left in this process
            pool.submit(int).result()
        yield lambda function, *args: pool.submit(function, *args).result(timeout=300)


@pytest.fixture(scope="module")
def examined(elsewhere):
    """examine, which remembers what it has examined."""
    return functools.cache(lambda *args: elsewhere(examine, *args))


def wait_in_all_ways() -> dict[str, int]:
    from common.lab.fake_accelerator import pretend

    with pretend({"data": 4}, size=4) as (_, watch):
        phase, x, mask = watch.begin("waits"), torch.ones(4, 3, device="gpu"), torch.ones(4, device="gpu") > 0
        assert float(x.sum()) == int(x.max()) == 0 and not mask.any()  # item: 3
        assert x.tolist() == [[0.0] * 3] * 4  # tolist: 1
        assert mask.nonzero().shape == (0, 1) and x[mask].shape == (0, 3)  # nonzero: 1, indexing by a mask: 1
        assert torch.equal(x, x) and x.masked_select(x > 0).shape == (0,)  # equal: 1, masked_select: 1
        x[mask] = x[:1]  # indexing by a mask: 2
        x.cpu(), x.to("cpu", non_blocking=True)  # copy to the host: 1
        x.copy_(torch.ones(4, 3)), torch.ones(3).to("gpu", non_blocking=True)  # copy to the device: 1
        x[[0, 2]], x[torch.tensor([0, 2])], torch.tensor([1, 2], device="gpu")  # copy to the device: 4
        assert x[torch.tensor([0, 2]), torch.tensor([1, 1])].shape == (2,)  # copy to the device: 2
        torch.gpu.synchronize()
        torch.gpu.Event().synchronize()  # synchronize: 2
        # None of these waits.
        x[mask], x[:, None], _ = 0, torch.where(x > 0, 1.0, 0.0)[:, None], torch.tensor(2.0) * x * torch.tensor(2.0)
        seen = Counter()
        for (kind, _), number in phase.waits.items():
            seen[kind] += number
        return dict(seen)


def count_bytes() -> list[int]:
    from common.lab.fake_accelerator import pretend

    with pretend({"data": 4}, size=4, devices=2) as (_, watch):
        x = torch.zeros(100, device="gpu")
        y = x.view(10, 10)[1:]  # no memory of its own
        numbers = [watch.now[0]]
        z = y * 2
        del x
        numbers.append(watch.now[0])
        z.untyped_storage().resize_(0)
        numbers.append(watch.now[0])
        parameter = torch.nn.Parameter(torch.zeros(50))
        parameter.data = parameter.data.to("gpu")
        del y
        other = torch.zeros(20, device="gpu:1")
        numbers += [watch.now[0], watch.phase.peak, watch.now[other.device.index]]
        phase, one_more = watch.begin("with a budget", {"all": 300}), torch.zeros(50, device="gpu")
        named = re.findall(r"([\d,]+) of ", phase.crossed)
        return [*numbers, one_more.nbytes, sum(int(number.replace(",", "")) for number in named)]


def test_each_kind_of_wait_is_counted(elsewhere):
    assert elsewhere(wait_in_all_ways) == {
        "item": 3, "tolist": 1, "nonzero": 1, "equal": 1, "masked_select": 1, "indexing by a mask": 2,
        "copy to the host": 1, "copy to the device": 6, "synchronize": 2,
    }  # fmt: skip


def test_bytes_are_those_of_living_storages(elsewhere):
    found = elsewhere(count_bytes)
    assert found[:6] == [400, 400 + 360, 400, 200, 400 + 360, 80], "bytes alive, in the end on the second device"
    assert found[6:] == [200, 200 + 200], "what is named where a budget is crossed is all that is alive there"


def test_every_strategy_is_examined():
    table = {(name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations}
    assert {case.who for case in CASES} == (table if FULL else table - WEEKLY) and table >= WEEKLY
    each = [sum(case.size == size for case in CASES) for size in (4, 8)]
    assert each == [len(table)] * 2 if FULL else min(each) >= len(CASES) // 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_its_word(case, examined):
    phases, says, refusals = examined(case)
    for phase, said in zip(phases, says, strict=True):
        parts = ", ".join(f"{what} {size:,}" for what, size in said.items())
        print(f"{case}, {phase.name}: at most {phase.peak:,} bytes, of states {sum(said.values()):,} ({parts})")
        print(f"    the host waits {sum(phase.waits.values())} times")
    assert not refusals, "\n".join(refusals)
    for phase, said in ((phases[0], says[0]), (phases[2], says[2])):
        states = sum(said.values())
        assert phase.peak > 0.97 * states, f"{phase.name}: {phase.peak:,} bytes are far below the {states:,} said"


@pytest.mark.parametrize("who", FP16 if FULL else [("ddp", "by-hand"), ("pipeline", "by-hand")], ids="-".join)
def test_waits_for_the_scale_in_fp16(who, examined):
    assert not [line for line in examined(Case(*who, 4, 0), "", "fp16")[2] if "waits" in line]


@pytest.mark.parametrize("name", PLANTED)
def test_mistake_is_refused(name, examined):
    who, _, pattern = PLANTED[name]
    refusals = examined(Case(*who, 4, 0), name)[2]
    assert any(re.search(pattern, line) for line in refusals), "\n".join(refusals) or "not refused"


def test_what_is_listed_is_needed(examined):
    """No name is on the list of senders for nothing, and nothing is sent from the CPU but in construction."""
    senders = set()
    for case in CASES:
        construction, *steps = examined(case)[0]
        senders |= {where.split()[-1] for _, kind, where in construction.messages if kind == "cpu"}
        assert not [key for step in steps for key in step.messages if key[1] == "cpu"]
        assert all(step.messages for step in steps) is (case.who not in {*ONE_PROCESS, ("single", "pytorch")})
    assert senders == set(FROM_CPU)
    assert set(WAITS) <= {case.who for case in CASES}


# --- checkpoints --------------------------------------------------------------------------------------------------


def save_and_count(case: Case, planted: bool) -> tuple[int, int, int]:
    """Save a checkpoint after two steps: (bytes alive before; at most meanwhile; bytes of what is written). `planted`:
    with all parameters gathered first."""
    from common import checkpoint, pieces
    from common.lab.fake_accelerator import pretend

    warnings.filterwarnings("ignore", "PyTorch is not compiled with NCCL support")
    config, written = settings(case), []
    with contextlib.ExitStack() as stack:
        mesh, watch = stack.enter_context(pretend(config.axes, case.rank, case.size, 1, (1, 1, WIDTH)))
        with torch.device("meta" if config.strategy_class.from_meta and case.rank > 0 else "cpu"):
            model = config.strategy_class.make_model(config)
        strategy = config.strategy_class(model, Task(None, config).make_optimizer, Setup(mesh, config.options))
        tokens = torch.zeros(getattr(config.options, "microbatches", case.size), 1, dtype=torch.long, device="gpu")
        for _ in range(2):
            strategy.step([(tokens, tokens.clone())])
        # There are no numbers to write or to compare, and no file: only what passes through memory.
        stand_ins = [
            (torch, "save", lambda tensor, stream: written.append(tensor.nbytes)),
            (pieces, "digest", lambda tensor: int(tensor.cpu().numel())),
            (checkpoint, "random_state", lambda device: []),
            (checkpoint.Writer, "finish", lambda *args, **named: None),
            (checkpoint.dcp, "save", functools.partial(checkpoint.dcp.save, no_dist=True)),
        ]
        for stand_in in stand_ins:
            stack.enter_context(mock.patch.object(*stand_in))
        strategy.optimizer.zero_grad()
        before, phase = watch.now[0], watch.begin("saving")
        whole = [parameter.full_tensor() for parameter in model.parameters()] if planted else []
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.Saver().save(Path(folder, "checkpoint-000001"), strategy, {})
        return before, phase.peak + 0 * len(whole), sum(written)


SHARDED = [("fsdp", "pytorch"), ("fsdp", "by-hand"), *[("zero2", "pytorch"), ("pipeline+fsdp", "pytorch")] * FULL]


@pytest.mark.parametrize("who", SHARDED, ids="-".join)
def test_a_checkpoint_is_saved_within_a_share_and_a_unit(who, elsewhere):
    """Parameters and AdamW's two averages of a shard, and at most a unit beside them."""
    case = Case(*who, 4, 0)
    s = sizes(case)
    share = 3 * s.share // s.n
    before, peak, written = elsewhere(save_and_count, case, False)
    print(f"{case}: {before:,} bytes before, at most {peak:,} while {written:,} are written; a unit is {s.unit:,}")
    assert 0.99 * share < written < 1.01 * share + 1000, "what is written is this rank's share"
    assert peak <= share + s.unit, f"{peak:,} bytes are more than a share of {share:,} and a unit of {s.unit:,}"
    if who == ("fsdp", "pytorch"):
        assert elsewhere(save_and_count, case, True)[1] > share + s.unit, "whole parameters would be seen"


def offloaded(old: bool) -> tuple[set[str], set[str]]:
    """Devices of parameters and gradients, and of what layers compute, with the old class and with its translation."""
    from torch.distributed import fsdp

    from common.lab.fake_accelerator import pretend

    computed: set[str] = set()
    pinned = mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # neither works with fake tensors
    recorded = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None)
    with pretend({"shard": 2}, size=2) as (mesh, _), pinned, recorded:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        for layer in model:
            layer.register_forward_hook(lambda *seen: computed.add(seen[2].device.type))
        if old:
            how = {"device_id": torch.device("gpu", 0), "process_group": mesh.get_group()}
            model = fsdp.FullyShardedDataParallel(model, cpu_offload=fsdp.CPUOffload(offload_params=True), **how)
        else:
            fsdp.fully_shard(model, mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8, device="gpu")).square().mean().backward()
            optimizer.step()
        return {tensor.device.type for p in model.parameters() for tensor in (p, p.grad)}, computed


def test_cpu_offload_and_its_translation_keep_on_the_host_what_layers_use_on_the_device(elsewhere):
    """The classes refuse the CPU, and the front page has them in its table of old names."""
    assert elsewhere(offloaded, True) == elsewhere(offloaded, False) == ({"cpu"}, {"gpu"})


def trained_where(device_ids: list[int] | None, moved: bool) -> set[str]:
    """Devices of what DDP's model gets, gives and keeps as gradients; its inputs `moved` by the program or not."""
    from common.lab.fake_accelerator import pretend

    with pretend({"data": 2}, size=2) as (mesh, _):
        model, seen = torch.nn.Linear(8, 8).to("gpu"), []
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids, process_group=mesh.get_group())
        inputs = torch.ones(4, 8)
        outputs = ddp(inputs.to("gpu") if moved else inputs)
        outputs.square().mean().backward()
        return {tensor.device.type for tensor in (*seen, outputs, model.weight.grad)}


def test_device_ids_of_ddp_and_its_translation_compute_on_the_device(elsewhere):
    """Both forms of the front page's table; on CPUs DDP refuses device_ids. Who leaves them out has to move inputs."""
    assert elsewhere(trained_where, [0], False) == elsewhere(trained_where, None, True) == {"gpu"}
    with pytest.raises(AssertionError, match="mixes tensors of the cpu and of the gpu"):
        elsewhere(trained_where, None, False)


def test_a_broadcast_to_devices_copies_to_the_others_alone(monkeypatch):
    """As CUDA's does: the parameters of the first device are not copied on it once more."""
    from common.lab import fake_patches

    tensor = mock.Mock(device=torch.device("cuda", 0), to=lambda device, copy=False: f"a copy on {device}")
    monkeypatch.setattr(fake_patches, "gpu", lambda number: number)
    assert fake_patches.broadcast_to_devices([tensor], [0, 1], None) == [[tensor], ["a copy on 1"]]
