"""Settings that cannot work are refused where the border is: what just fits is taken, what just does not is refused in
one line that names the option, the number and a number that would do."""

import contextlib
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import configure, launcher
from torch import nn

from common import ROOT
from common.errors import UserError
from common.mesh import Axis
from common.model import GPT
from course.fsdp import fsdp_setup, qlora_command
from course.fsdp.by_hand_zero23 import units_of
from course.model_parallel.by_hand_experts import apply_expert_parallel
from course.model_parallel.by_hand_layers import cut, layers_of
from course.model_parallel.by_hand_ring_attention import apply_context_parallel
from course.model_parallel.by_hand_ulysses import apply_ulysses
from course.model_parallel.division import require_divisible as require_divisible_tensor
from course.model_parallel.moe_model import MixtureGPT
from course.pipeline import pipeline_hybrids as hybrid
from course.pipeline import schedules, simulator, split
from course.pipeline.options import require_divisible
from course.strategies import STRATEGIES, load

TEXT = "--layers 4 --heads 6 --width 96 --context 24 --batch-size 48"
LINES = [  # ranks, the command line, and words of its refusal; none where nothing is wrong
    (6, "--strategy model --by-hand", ()),
    (7, "--strategy model --by-hand", ("7 ranks", "6 layers", "--layers 5")),
    (4, "--strategy context --by-hand", ()),
    (4, "--strategy context --by-hand --context 20", ("--context 20", "4 rank", "16")),
    (4, "--strategy context --by-hand --context 2", ("--context 2", "8")),
    (3, "--strategy ulysses --by-hand", ()),
    (4, "--strategy ulysses --by-hand", ("--heads 6", "4 ranks")),
    (8, "--strategy expert --by-hand --experts 8 --top-k 8", ()),
    (1, "--strategy expert --by-hand --experts 2 --top-k 3", ("--top-k 3", "--experts 2")),
    (4, "--strategy expert --by-hand --experts 3 --top-k 2", ("--experts 3", "4 ranks")),
    (4, "--strategy expert --by-hand --experts 6", ("--experts 6", "4")),
    (4, "--strategy tensor --heads 4", ()),
    (4, "--strategy tensor", ("--heads 6", "4")),
    (5, "--strategy tensor --heads 5 --width 100", ("vocabulary of 256", "5")),
    (4, "--strategy sequence --by-hand --heads 4", ()),
    (4, "--strategy sequence --by-hand --heads 4 --context 22", ("--context 22", "4")),
    (1, "--strategy expert --by-hand --top-k 0", ("--top-k", "1", "0")),
    (6, "--strategy pipeline+ddp --by-hand --mesh data=3,pipeline=2 --accumulation-steps 2", ()),  # 3 x 2 x 4 of 48
    (10, "--strategy pipeline+ddp --by-hand --mesh data=5,pipeline=2 --accumulation-steps 2",
     ("--batch-size 48", "5 pipeline", "--accumulation-steps 2", "--microbatches 4", "40")),
    (30, "--strategy pipeline+ddp --by-hand --mesh data=15,pipeline=2 --accumulation-steps 2",
     ("--batch-size 48", "nearest", "120")),  # and not 0
    (4, "--strategy pipeline+fsdp --mesh shard=2,pipeline=2 --batch-size 8", ()),  # 2 x 4
    (10, "--strategy pipeline+fsdp --mesh shard=5,pipeline=2", ("--batch-size 48", "5 pipeline", "20", "40")),
    (2, "--strategy pipeline --by-hand --recompute full", ()),
    (2, "--strategy pipeline --by-hand --recompute selective", ("--recompute selective", "full", "none")),
    (6, "--strategy pipeline --by-hand", ()),
    (7, "--strategy pipeline --by-hand", ("7 stages", "6 layers", "--layers 5")),
    (4, "--strategy pipeline --schedule 1f1b", ()),
    (4, "--strategy pipeline --schedule gpipe --microbatches 3", ()),
    (4, "--strategy pipeline --schedule 1f1b --microbatches 3", ("--schedule 1f1b", "--microbatches 4", "--by-hand")),
    (4, "--strategy pipeline --schedule zb-h1 --microbatches 3", ()),
    (4, "--strategy pipeline --schedule zb-h1 --microbatches 8", ()),
    (4, "--strategy pipeline --schedule zb-h1 --microbatches 9 --batch-size 45",
     ("--schedule zb-h1", "9", "--microbatches 8")),
    (4, "--strategy pipeline+ddp --microbatches 3", ()),
    (4, "--strategy pipeline+ddp --microbatches 2", ("--microbatches 2", "4", "--by-hand")),
    (4, "--strategy pipeline+ddp --schedule gpipe", ("--schedule gpipe", "1f1b", "--by-hand")),
    (4, "--strategy pipeline+ddp --schedule interleaved --microbatches 8", ("--schedule interleaved", "--by-hand")),
    (4, "--strategy pipeline+fsdp --schedule interleaved", ()),
    (4, "--strategy pipeline+fsdp --schedule dualpipev", ("--schedule dualpipev", "--strategy pipeline+ddp --by-hand")),
    (2, "--strategy mesh --by-hand --mesh pipeline=2", ()),
    (4, "--strategy mesh --by-hand --mesh pipeline=2,shard=2", ("--mesh", "'shard'", "'pipeline'", "--by-hand")),
    (5, "--strategy mesh --by-hand --mesh context=5", ("--context 24", "5 rank", "20")),
    (4, "--strategy mesh --by-hand --mesh tensor=4", ("--heads 6", "4")),
    (3, "--strategy mesh --by-hand --mesh tensor=3", ("vocabulary of 256", "3")),
    (3, "--strategy mesh --mesh tensor=3", ("vocabulary of 256", "3")),
    (2, "--strategy mesh --mesh pipeline=2 --microbatches 1", ("--schedule 1f1b", "--microbatches 2", "--by-hand")),
    (4, "--strategy mesh --mesh pipeline=2,shard=2 --schedule zbv", ("--schedule zbv", "--strategy pipeline+ddp")),
    (2, "--strategy mesh --by-hand --mesh pipeline=2 --schedule zbv", ()),
    (4, "--strategy zero2 --offload", ()),
    (4, "--strategy zero2 --find-batch-size --memory-budget 0.5", ()),
    (4, "--strategy zero2 --find-batch-size --offload --memory-budget 1", ("--find-batch-size", "--offload")),
    (4, "--strategy zero2 --find-batch-size", ("--find-batch-size", "--memory-budget 0")),
    (4, "--strategy zero2 --find-batch-size --memory-budget -1", ("--memory-budget -1",)),
    (4, "--strategy zero2 --find-batch-size --memory-budget inf", ("--memory-budget inf",)),
    (4, "--strategy zero1 --offload", ("--offload", "fsdp", "'zero1'")),
    (4, "--strategy fsdp --by-hand --offload", ("--offload", "by hand")),
    (4, "--strategy hsdp --find-batch-size", ("--find-batch-size", "zero2", "'hsdp'")),
    (4, "--strategy hsdp --mesh data=3,shard=2", ("--mesh data=3,shard=2", "6 rank", "4")),
    (4, "--strategy hsdp --mesh tensor=2", ("--mesh tensor=2", "'hsdp'", "data", "shard")),
    (4, "--strategy tensor+fsdp --heads 3 --width 96", ("heads",)),
    (4, "--mesh context=2,tensor=2", ("'mesh'", "'context'", "--by-hand")),
    (4, "--by-hand --mesh expert=2,tensor=2 --heads 4", ("'mesh'", "'expert'")),
    (8, "--mesh pipeline=2,tensor=2 --heads 4", ("--mesh pipeline=2,tensor=2", "4 rank", "8")),
    (4, "--by-hand --mesh data=2,expert=2 --experts 3", ("--experts 3", "2 ranks")),
    (8, "--strategy pipeline --schedule zbv --layers 4", ("16 stages", "6 layers")),
    (4, "--strategy pipeline --split-spec blocks.1:end", ("--split-spec", "2 stages", "4")),
    (4, "--strategy pipeline --split-spec blocks.0:end,blocks.1:end,blocks.2:end", ()),
    (4, "--strategy zero2 --memory-budget 2", ("--memory-budget", "--find-batch-size")),
]  # fmt: skip


def refusal_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def names(refusal: str, words: tuple[str, ...]) -> None:
    assert bool(refusal) == bool(words), refusal or "not refused"
    assert not [word for word in words if word not in refusal], refusal


@pytest.mark.parametrize("ranks, line, words", LINES)
def test_a_command_line_is_refused_at_the_border(ranks, line, words, tmp_path):
    names(refusal_of(lambda: configure(f"{TEXT} {line}", ranks, run_dir=tmp_path / "run")), words)


@pytest.mark.parametrize(
    "name, kind", [(name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations]
)
def test_what_divides_a_gpt_trains_no_images(name, kind, tmp_path):
    """And what divides batches and state trains any model. (`model` has no axis where one process has all devices.)"""
    line = f"--task images --strategy {name} --implementation {kind} --run-dir {tmp_path / 'run'}"
    ranks = max(STRATEGIES[name].sizes(kind))
    axes = {*load(name, kind).preset, *load(name, kind).axes}
    refused = () if axes <= {"data", "shard"} and name != "model" else ("--task images", f"'{name}'", "--task text")
    names(refusal_of(configure, line, ranks), refused)
    if not refused and "recompute" in load(name, kind).Options.__dataclass_fields__:
        names(refusal_of(configure, f"{line} --recompute full", ranks), ("--recompute full", "--task images"))


@pytest.mark.parametrize("ranks, line, words", [
    (1, "--make-base new", ()),
    (2, "--out new", ()),
    (1, "--adapter a --merge new", ()),
    (1, "--merge new", ("--merge", "--adapter")),
    (2, "--adapter a", ("--adapter", "torchrun")),
    *((1, f"{line} file", (line.split()[-1], "file")) for line in ("--make-base", "--out", "--adapter a --merge")),
])  # fmt: skip
def test_a_line_of_qlora_is_refused_before_anything_is_computed(ranks, line, words, tmp_path, monkeypatch, capsys):
    """One line and exit code 2, also for folders that cannot be written, which "file" is none of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(qlora_command.installed, "missing", lambda *about: "")
    with launcher(0, ranks), pytest.raises(SystemExit) if words else contextlib.nullcontext() as ended:
        qlora_command.read_command("", ["--config", str(ROOT / "configs/engines/fsdp_qlora_small.yaml"), *line.split()])
    said = capsys.readouterr().err
    assert (tmp_path / "new").is_dir() == ("new" in line and not words)
    assert not words or ended.value.code == 2 and said.count("\n") == 1
    names(said.strip(), words)


class Apart(nn.Module):
    """With a parameter that is in no child."""

    def __init__(self):
        super().__init__()
        self.inside, self.own = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))


ALONE = Axis(None, 0, 4)  # without a group: what is refused is refused before anything is sent
PLACES = ["embedding", "blocks.0", "head"]
CALLS = [  # what is called, with what, and words of its refusal
    (lambda: MixtureGPT(1, 8, 2, 4, experts=2, top_k=3), (), ("3 of 2 experts", "at most 2")),
    (require_divisible, (torch.zeros(6, 2), 3), ()),
    (require_divisible, (torch.zeros(6, 4), 4), ("6 examples", "4")),
    (split.named, ("blocks.0: end", PLACES, 2), ()),
    (split.named, ("blocks.3: end", PLACES, 2), ("--split-spec", "'blocks.3'", "'blocks.0'")),
    (split.named, ("tail: end", PLACES, 2), ("--split-spec", "'tail'", "'head'")),
    (split.named, ("head: before", PLACES, 2), ("--split-spec", "head: before", "head: beginning", "head: end")),
    (split.named, ("embedding: beginning", PLACES, 2), ("--split-spec", "embedding")),
    (split.named, ("head: beginning", PLACES, 3), ("--split-spec", "2 stages", "3", "2 place")),
    (schedules.parse, ("0F0 1X2",), ("'1X2'", "SEND_F")),
    (schedules.build, ("1f2b", 2, 2), ("'1f2b'", *schedules.SCHEDULES)),
    (schedules.build, ("1f1b", 0, 2), ("ranks", "0")),
    (schedules.build, ("1f1b", 2, 0), ("micro-batches", "0")),
    (schedules.build, ("1f1b", 2, 2, 0), ("stages per rank", "0")),
    (schedules.build, ("looped-bfs", 2, 2, 1), ("'looped-bfs'", "2 or more", "1")),
    (schedules.build, ("looped-bfs", 2, 2, 2), ()),
    (schedules.build, ("zbv", 2, 2, 3), ("'zbv'", "2 stage", "3")),
    (schedules.build, ("dualpipev", 3, 5), ("'dualpipev'", "3 ranks", "6", "5")),
    (schedules.build, ("dualpipev", 3, 6), ()),
    (schedules.build, ("interleaved", 4, 9, 2), ("'interleaved'", "4 ranks", "9", "8 or 12")),
    (simulator.Times(forward=[1, 2]).per_stage, (3,), ("forward", "2 times", "3 stages")),
    (simulator.Times(backward_weight=0).per_stage, (3,), ("backward_weight", "0")),
    (simulator.Times(communication=-1).per_stage, (3,), ("communication", "-1")),
    (simulator.Times(communication=0).per_stage, (3,), ()),
    (require_divisible_tensor, (GPT(1, 8, 2, 6), 4), ("heads 2", "4")),
    (require_divisible_tensor, (GPT(1, 12, 4, 6, 66), 4), ("vocabulary 66", "4")),
    (require_divisible_tensor, (GPT(1, 8, 4, 6), 4), ()),
    (require_divisible_tensor, (GPT(1, 8, 4, 6), 4, True), ("context 6", "4")),
    (apply_context_parallel, (GPT(1, 16, 4, context=12), ALONE), ("--context 12", "16")),
    (apply_ulysses, (GPT(1, 16, 2, context=16), ALONE), ("--heads 2", "4 ranks")),
    (apply_expert_parallel, (MixtureGPT(1, 8, 2, 4, experts=6), ALONE), ("experts 6", "4 ranks")),
    (layers_of, (nn.Linear(1, 1),), ("Linear", "--task text")),
    (cut, ([1, 1, 1], 4), ("4 ranks", "3 layers", "--layers 2")),
    (units_of, (Apart(), SimpleNamespace(group=None)), ("parameter", "child")),
]


@pytest.mark.parametrize("function, arguments, words", CALLS)
def test_a_call_is_refused_at_the_border(function, arguments, words):
    names(refusal_of(function, *arguments), words)


def test_what_offloading_takes_of_a_nodes_memory(monkeypatch):
    """16 bytes for each parameter, of which two of four ranks are on this node: half of them."""
    parameters = sum(p.numel() for p in GPT(2, 32, 4, 16).parameters())
    monkeypatch.setattr(fsdp_setup, "environment", lambda: (0, 4, 0, 2))
    line = "--strategy fsdp --offload --layers 2 --width 32 --heads 4 --context 16"
    for missing, words in ((0, ()), (1, ("--offload", "2 rank", "0.0 GiB"))):
        free = SimpleNamespace(available=8 * parameters - missing)
        monkeypatch.setattr(fsdp_setup.psutil, "virtual_memory", lambda free=free: free)
        names(refusal_of(configure, line, 4), words)
        names(refusal_of(configure, f"{line} --dry-run", 4), ())  # of a run that may be for another machine


@pytest.mark.parametrize("name", [name for name in schedules.SCHEDULES if name != "1f1b"])
def test_what_a_refusal_recommends_is_not_refused(name):
    recommended = "--strategy pipeline+fsdp" in refusal_of(hybrid.require_for_ddp, name, 2, 8)
    assert recommended == (not refusal_of(hybrid.require_for_fsdp, name))


TOO_MANY = {  # ranks among which a program cannot divide, and what it divides
    "04_model_parallel/standalone.py": (3, "128 features"),
    "04_model_parallel/standalone_layers.py": (5, "4 blocks"),
    "05_pipeline/standalone.py": (5, "4 blocks"),
}


@pytest.mark.parametrize("program", TOO_MANY)
def test_programs_refuse_ranks_among_which_they_cannot_divide(program, monkeypatch):
    ranks, divided = TOO_MANY[program]
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    train = runpy.run_path(str(ROOT / program), run_name="borrowed")["train"]
    with pytest.raises(SystemExit) as refused:
        train(torch.device("cpu"))
    names(str(refused.value.code), (divided, f"{ranks} ranks"))
