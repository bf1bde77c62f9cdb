"""What the chapters' strategies declare of themselves, as one table, and what they say, word by word, of settings that
cannot work."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import configure
from torch import nn

from common import ROOT
from common.errors import UserError
from common.model import GPT
from course.ddp.by_hand import tell
from course.fsdp import fsdp_setup
from course.fsdp.by_hand_zero23 import units_of
from course.model_parallel import by_hand_experts, by_hand_layers, by_hand_tensor, by_hand_ulysses
from course.model_parallel import by_hand_ring_attention as ring
from course.model_parallel.layers_on_devices import devices_of
from course.model_parallel.moe_model import MixtureGPT
from course.pipeline import options as pipeline_options
from course.pipeline import pipeline_hybrids, schedules, simulator, split
from course.strategies import STRATEGIES, load

PIPELINE = "schedule microbatches stages_per_rank split_spec recompute"
BUDGET = "recompute offload find_batch_size memory_budget"
DECLARED = {  # the mesh where none is named; its axes, if it may have more; from_meta; options; ranks
    ("single", "pytorch"): ("data=-1", "", False, "recompute", (1,)),
    ("dp", "pytorch"): ("data=-1", "", False, "", (1,)),
    ("dp", "by-hand"): ("data=-1", "", False, "", (1,)),
    ("ddp", "pytorch"): ("data=-1", "", False, "recompute loading", (1, 2, 4)),
    ("ddp", "by-hand"): ("data=-1", "", False, "recompute loading", (1, 2, 4)),
    ("model", "pytorch"): ("data=-1", "", False, "", (1,)),
    ("model", "by-hand"): ("pipeline=-1", "", True, "", (1, 2, 4)),
    ("tensor", "pytorch"): ("tensor=-1", "", True, "", (1, 2, 4)),
    ("tensor", "by-hand"): ("tensor=-1", "", True, "", (1, 2, 4)),
    ("sequence", "by-hand"): ("tensor=-1", "", True, "", (1, 2, 4)),
    ("context", "by-hand"): ("context=-1", "", False, "", (1, 2, 4)),
    ("ulysses", "by-hand"): ("context=-1", "", False, "", (1, 2, 4)),
    ("expert", "by-hand"): ("expert=-1", "data expert", True, "experts top_k", (1, 2, 4)),
    ("pipeline", "pytorch"): ("pipeline=-1", "", True, PIPELINE, (1, 2, 4)),
    ("pipeline", "by-hand"): ("pipeline=-1", "pipeline data", True, PIPELINE, (1, 2, 4)),
    ("pipeline+ddp", "pytorch"): ("data=2 pipeline=-1", "", True, PIPELINE, (2, 4)),
    ("pipeline+ddp", "by-hand"): ("data=2 pipeline=-1", "pipeline data", True, PIPELINE, (2, 4)),
    ("pipeline+fsdp", "pytorch"): ("shard=2 pipeline=-1", "", True, PIPELINE, (2, 4)),
    ("zero1", "pytorch"): ("shard=-1", "", True, "recompute", (1, 2, 4)),
    ("zero1", "by-hand"): ("shard=-1", "", True, "recompute", (1, 2, 4)),
    ("zero2", "pytorch"): ("shard=-1", "", True, BUDGET, (1, 2, 4)),
    ("zero2", "by-hand"): ("shard=-1", "", True, "recompute", (1, 2, 4)),
    ("fsdp", "pytorch"): ("shard=-1", "", True, BUDGET, (1, 2, 4)),
    ("fsdp", "by-hand"): ("shard=-1", "data shard", True, "recompute", (1, 2, 4)),
    ("hsdp", "pytorch"): ("data=2 shard=-1", "", True, "recompute offload", (4,)),
    ("hsdp", "by-hand"): ("data=2 shard=-1", "data shard", True, "recompute", (4,)),
    ("tensor+fsdp", "pytorch"): ("shard=2 tensor=-1", "", True, "recompute", (4,)),
    ("mesh", "pytorch"): ("data=-1", "pipeline data shard tensor", True, PIPELINE, (2, 4, 8)),
    ("mesh", "by-hand"): ("data=-1", "pipeline data shard context tensor", True, PIPELINE, (2, 4, 8)),
}
ALONE = {("single", "pytorch"), ("dp", "pytorch"), ("dp", "by-hand"), ("model", "pytorch")}  # every rank reads all
DEFAULTS = {"recompute": "none", "loading": "shard", "experts": 8, "top_k": 2, "schedule": "1f1b", "microbatches": 4,
            "stages_per_rank": 0, "split_spec": "auto", "offload": False, "find_batch_size": False,
            "memory_budget": 0.0}  # fmt: skip


def test_what_strategies_declare():
    kinds = [(name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations]
    assert kinds == list(DECLARED)
    for (name, kind), (preset, axes, from_meta, options, ranks) in DECLARED.items():
        cls, who = load(name, kind), f"{name} {kind}"
        assert " ".join(f"{axis}={size}" for axis, size in cls.preset.items()) == preset, f"{who}: its mesh by default"
        assert " ".join(cls.axes) == axes, f"{who}: the axes that its mesh may have"
        assert cls.from_meta == from_meta, f"{who}: whether it takes a model without memory"
        assert " ".join(cls.Options.__dataclass_fields__) == options, f"{who}: its options"
        assert STRATEGIES[name].sizes(kind) == ranks, f"{who}: on how many ranks it equals one process"
        read = () if (name, kind) in ALONE else ("data", "shard", "expert")
        assert cls.data_axes == read, f"{who}: along which axes ranks read other examples"
        assert cls.model_class is (MixtureGPT if name == "expert" else GPT), f"{who}: the model of text"
        found = cls.Options()
        assert {o: getattr(found, o) for o in options.split()} == {o: DEFAULTS[o] for o in options.split()}, who


WITHOUT_IMAGES = ["model", "tensor", "sequence", "context", "ulysses", "expert", "pipeline", "pipeline+ddp",
                  "pipeline+fsdp", "tensor+fsdp", "mesh"]  # fmt: skip


def test_what_divides_a_gpt_trains_no_images():
    for (name, kind), (_, _, _, options, _) in DECLARED.items():
        cls = load(name, kind)
        config = SimpleNamespace(task="images", strategy=name, layers=4, heads=4, width=64, context=64, batch_size=32,
                                 accumulation_steps=1, options=cls.Options())  # fmt: skip
        axes = {axis: 1 for axis in cls.axes or cls.preset}
        if name in WITHOUT_IMAGES:
            with pytest.raises(UserError) as error:
                cls.require(config, axes)
                pytest.fail(f"{name} {kind}: not refused")
            assert str(error.value) == f"--task images: strategy '{name}' divides a GPT; use --task text", kind
        else:
            cls.require(config, axes)
            if "recompute" in options:
                config.options.recompute = "full"
                with pytest.raises(UserError, match="^--recompute full is for the GPT's blocks, not for"):
                    cls.require(config, axes)
                    pytest.fail(f"{name} {kind}: --recompute full is not refused")


def settings(**options):
    return SimpleNamespace(task="text", strategy="it", layers=4, batch_size=48, accumulation_steps=2, heads=6, width=96,
                           context=24, options=pipeline_options.PipelineOptions(**options))  # fmt: skip


def mesh_of(kind, **options):
    return lambda axes: load("mesh", kind).require(settings(**options), axes)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.own = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))


SAID = [  # what is called, with what, and all that it says; None where nothing is wrong
    (by_hand_layers.require_layers, (6, 6), None),
    (by_hand_layers.require_layers, (6, 7), "7 ranks are more than 6 layers (embedding, 4 blocks, head), and each "
     "needs one; start at most 6 ranks, or make --layers 5"),
    (by_hand_layers.layers_of, (nn.Linear(1, 1),), "layers of a Linear are not cut, only those of a GPT; use --task "
     "text"),
    (ring.require_chunks, (24, 4), None),
    (ring.require_chunks, (20, 4), "--context 20 does not divide into 8 chunks, two for each of 4 rank(s); the nearest "
     "that does is 16"),
    (ring.require_chunks, (2, 4), "--context 2 does not divide into 8 chunks, two for each of 4 rank(s); the nearest "
     "that does is 8"),
    (by_hand_ulysses.require_whole_heads, (6, 3), None),
    (by_hand_ulysses.require_whole_heads, (6, 4), "--heads 6 does not divide by 4 ranks, and Ulysses gives each rank "
     "whole heads; use ring attention, or start a number of ranks that divides 6"),
    (by_hand_experts.require_experts, (8, 8, 8), None),
    (by_hand_experts.require_experts, (2, 3, 1), "--top-k 3 is more than --experts 2: a token goes to an expert once"),
    (by_hand_experts.require_experts, (3, 2, 4), "--experts 3 are fewer than 4 ranks; use 4 or a multiple"),
    (by_hand_experts.require_experts, (6, 2, 4), "--experts 6 do not divide by 4 ranks; use a multiple of 4"),
    (lambda: MixtureGPT(1, 8, 2, 4, experts=2, top_k=3), (), "a token cannot go to 3 of 2 experts; choose top-k of at "
     "most 2"),
    (by_hand_tensor.require_multiples, (3, {"--heads": 6, "--width": 8}), "--width 8 cannot be cut into 3 equal parts; "
     "start a number of ranks that divides it"),
    (by_hand_tensor.require_divisible, (GPT(1, 8, 2, 6), 4), "heads 2 cannot be cut into 4 equal parts; start a number "
     "of ranks that divides it"),
    (by_hand_tensor.require_divisible, (GPT(1, 8, 4, 6), 4), None),
    (by_hand_tensor.require_divisible, (GPT(1, 8, 4, 6), 4, True), "context 6 cannot be cut into 4 equal parts; start "
     "a number of ranks that divides it"),
    (pipeline_options.require_divisible, (torch.zeros(6, 2), 3), None),
    (pipeline_options.require_divisible, (torch.zeros(6, 4), 4), "6 examples cannot be cut into 4 equal micro-batches"),
    (pipeline_options.require, (settings(), {"pipeline": 2, "data": 3}), None),  # 3 x 2 x 4 parts of 48
    (pipeline_options.require, (settings(), {"pipeline": 2, "data": 5}), "--batch-size 48 does not divide by 5 "
     "pipeline(s) x --accumulation-steps 2 x --microbatches 4 = 40; the nearest that does is 40"),
    (pipeline_options.require, (settings(), {"pipeline": 2, "data": 2, "shard": 5}), "--batch-size 48 does not divide "
     "by 10 pipeline(s) x --accumulation-steps 2 x --microbatches 4 = 80; the nearest that does is 80"),
    (pipeline_options.require, (settings(), {"pipeline": 2, "data": 15}), "--batch-size 48 does not divide by 15 "
     "pipeline(s) x --accumulation-steps 2 x --microbatches 4 = 120; the nearest that does is 120"),  # and not 0
    (pipeline_options.require, (settings(recompute="selective"), {"pipeline": 2}), "--recompute selective: a "
     "pipeline's stages compute all again, or nothing; take full or none"),
    (pipeline_options.require, (settings(), {"pipeline": 7}), "7 stages are more than 6 layers (embedding, 4 blocks, "
     "head), and each needs one; make --layers 5, or have fewer stages"),
    (pipeline_options.require_in_torch, ("1f1b", 4, 4), None),
    (pipeline_options.require_in_torch, ("gpipe", 4, 3), None),
    (pipeline_options.require_in_torch, ("1f1b", 4, 3), "--schedule 1f1b: PyTorch's wants a micro-batch for each of 4 "
     "ranks, not 3; make --microbatches 4, or add --by-hand"),
    (pipeline_options.require_in_torch, ("zb-h1", 4, 3), None),
    (pipeline_options.require_in_torch, ("zb-h1", 4, 8), None),
    (pipeline_options.require_in_torch, ("zb-h1", 4, 9), "--schedule zb-h1: PyTorch's deals micro-batches out to 2 "
     "equal rounds, and 9 are not; make --microbatches 8, or add --by-hand"),
    (pipeline_hybrids.require_for_ddp, ("1f1b", 2, 1), None),
    (pipeline_hybrids.require_for_ddp, ("1f1b", 2, 3), None),
    (pipeline_hybrids.require_for_ddp, ("1f1b", 2, 2), "--microbatches 2: PyTorch's DistributedDataParallel works in a "
     "pipeline of 2 ranks with more micro-batches than that; make it 4, or add --by-hand"),
    (pipeline_hybrids.require_for_ddp, ("gpipe", 2, 4), "--schedule gpipe: PyTorch's DistributedDataParallel works in "
     "a pipeline with schedule 1f1b alone; take that, or --strategy pipeline+fsdp, or add --by-hand"),
    (pipeline_hybrids.require_for_ddp, ("dualpipev", 2, 4), "--schedule dualpipev: PyTorch's DistributedDataParallel "
     "works in a pipeline with schedule 1f1b alone; take that, or add --by-hand"),
    (pipeline_hybrids.require_for_fsdp, ("interleaved",), None),
    (pipeline_hybrids.require_for_fsdp, ("dualpipev",), "--schedule dualpipev puts the first and the last stage on one "
     "rank, and fully_shard would make two weights of the one that they share; take another schedule, or --strategy "
     "pipeline+ddp --by-hand"),
    (split.named, ("blocks.3: end", ["embedding", "blocks.0", "head"], 2), "--split-spec: the model has no layer "
     "'blocks.3'; did you mean 'blocks.0'?"),
    (split.named, ("tail: end", ["embedding", "blocks.0", "head"], 2), "--split-spec: the model has no layer 'tail'; "
     "did you mean 'head'?"),
    (split.named, ("head: before", ["embedding", "head"], 2), "--split-spec: 'head: before': write 'head: beginning' "
     "or 'head: end'"),
    (split.named, ("embedding: beginning", ["embedding", "head"], 2), "--split-spec: there is nothing to cut off "
     "before embedding or after head"),
    (split.named, ("head: beginning", ["embedding", "blocks.0", "head"], 3), "--split-spec: 1 cut(s) make 2 stages, "
     "but ranks x stages per rank are 3; name 2 place(s)"),
    (schedules.parse, ("0F0 1X2",), "'1X2' is no action: write stage, kind (F, B, I, W, SEND_F, RECV_F, SEND_B, "
     "RECV_B) and micro-batch, as in 2F0"),
    (schedules.build, ("1f2b", 2, 2), "unknown schedule '1f2b'; known: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, "
     "interleaved-zb, zbv, dualpipev"),
    (schedules.build, ("1f1b", 0, 2), "a pipeline needs at least 1 of its ranks, not 0"),
    (schedules.build, ("1f1b", 2, 0), "a pipeline needs at least 1 of its micro-batches, not 0"),
    (schedules.build, ("1f1b", 2, 2, 0), "a pipeline needs at least 1 of its stages per rank, not 0"),
    (schedules.build, ("looped-bfs", 2, 2, 1), "schedule 'looped-bfs' needs 2 or more stages per rank, not 1"),
    (schedules.build, ("zbv", 2, 2, 3), "schedule 'zbv' needs 2 stage(s) per rank, not 3"),
    (schedules.build, ("dualpipev", 3, 5), "schedule 'dualpipev' on 3 ranks needs 6 or more micro-batches, not 5"),
    (schedules.build, ("interleaved", 4, 9, 2), "schedule 'interleaved' on 4 ranks cannot deal 9 micro-batches out to "
     "2 equal rounds; take 8 or 12"),
    (simulator.Times(forward=[1, 2]).per_stage, (3,), "forward: 2 times for 3 stages; give one for each, or one "
     "number"),
    (simulator.Times(backward_weight=0).per_stage, (3,), "backward_weight: an action takes more than no time, not 0"),
    (simulator.Times(communication=-1).per_stage, (3,), "communication: takes no less than no time, not -1"),
    (units_of, (Model(), SimpleNamespace(group=None)), "every parameter must be in one child of the model, or in "
     "children that share a unit"),
    (mesh_of("by-hand"), ({"pipeline": 2, "data": 1},), None),
    (mesh_of("by-hand"), ({"pipeline": 2, "shard": 2},), "--mesh: by hand, 'shard' and 'pipeline' do not go together, "
     "since a stage's units would be gathered for every micro-batch; use 'data' in the place of 'shard', or leave "
     "--by-hand out"),
    (mesh_of("by-hand"), ({"pipeline": 2, "shard": 1},), None),
    (mesh_of("by-hand"), ({"context": 5},), "--context 24 does not divide into 10 chunks, two for each of 5 rank(s); "
     "the nearest that does is 20"),
    (mesh_of("by-hand"), ({"tensor": 4},), "--heads 6 cannot be cut into 4 equal parts; start a number of ranks that "
     "divides it"),
    (mesh_of("by-hand"), ({"tensor": 3},), "the vocabulary of 256 cannot be cut into 3 equal parts; start a number of "
     "ranks that divides it"),
    (mesh_of("pytorch"), ({"tensor": 3},), "the vocabulary of 256 cannot be cut into 3 equal parts; start a number of "
     "ranks that divides it"),
    (mesh_of("pytorch", microbatches=1), ({"pipeline": 2},), "--schedule 1f1b: PyTorch's wants a micro-batch for each "
     "of 2 ranks, not 1; make --microbatches 2, or add --by-hand"),
    (mesh_of("pytorch", schedule="zbv"), ({"pipeline": 2, "shard": 1},), "--schedule zbv puts the first and the last "
     "stage on one rank, and fully_shard would make two weights of the one that they share; take another schedule, or "
     "--strategy pipeline+ddp --by-hand"),
    (mesh_of("by-hand", schedule="zbv"), ({"pipeline": 2},), None),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SAID)))
def test_what_is_said_word_by_word(number):
    function, arguments, said = SAID[number]
    told = None
    try:
        function(*arguments)
    except UserError as error:
        told = str(error)
    assert told == said, f"{getattr(function, '__name__', function)} of {arguments}"


def test_what_fsdp_says_of_its_memory_options(monkeypatch):
    def told(**options):
        config = SimpleNamespace(strategy="zero2", options=load("fsdp", "pytorch").Options(**options))
        try:
            fsdp_setup.require_memory_options(config, {"shard": 2})
        except UserError as error:
            return str(error)

    monkeypatch.setattr(fsdp_setup, "require_host_memory", lambda config, axes: None)
    assert told() is told(offload=True) is told(find_batch_size=True, memory_budget=0.5) is None
    assert told(find_batch_size=True, offload=True, memory_budget=1.0) == (
        "--find-batch-size is for PyTorch's fsdp and zero2, not for 'zero2' with --offload"
    )
    for budget in (0.0, -1.0, float("inf")):
        assert told(find_batch_size=True, memory_budget=budget) == (
            f"--find-batch-size: --memory-budget {budget} should be the GiB of a rank"
        )
    assert told(memory_budget=2.0) == "--memory-budget is what --find-batch-size stops at; add that, or leave it out"


def test_what_offloading_takes_of_a_nodes_memory(monkeypatch):
    """16 bytes for each of 31,808 parameters, of which two of four ranks are on this node: half of them."""
    parameters = sum(p.numel() for p in GPT(2, 32, 4, 16).parameters())
    config, free = configure("--strategy fsdp --layers 2 --width 32 --heads 4 --context 16", 4), [0]
    monkeypatch.setattr(fsdp_setup, "environment", lambda: (0, 4, 0, 2))
    monkeypatch.setattr(fsdp_setup.psutil, "virtual_memory", lambda: SimpleNamespace(available=free[0]))
    free[0] = 8 * parameters
    fsdp_setup.require_host_memory(config, {"shard": 4})
    free[0] = 8 * parameters - 1
    with pytest.raises(UserError) as error:
        fsdp_setup.require_host_memory(config, {"shard": 4})
        pytest.fail("a byte less than the shards of this node's two ranks take is not refused")
    assert str(error.value) == (
        "--offload: the shards of 2 rank(s), with gradients and optimizer, take 0.0 GiB of this node's memory, and 0.0 "
        "are free; start more nodes, or make the model smaller"
    )


def test_tensors_are_told_by_shape_type_and_kind():
    weight, frozen = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2).half(), requires_grad=False)
    assert tell(weight) == "of shape [2, 3], torch.float32" and tell(frozen) == "of shape [2], torch.float16, frozen"
    assert tell(torch.zeros(4), ", a buffer") == "of shape [4], torch.float32, a buffer"


def test_a_model_on_several_devices_says_where_there_is_one(monkeypatch, capsys):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    note = "note: no two GPUs for the parts of the model; all of them are on '{}'\n"
    assert devices_of(gpu) == [torch.device("cuda", number) for number in range(3)], "all GPUs of this machine"
    assert capsys.readouterr().err == ""
    assert devices_of(cpu) == [cpu, cpu] and capsys.readouterr().err == note.format("cpu")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    assert devices_of(gpu) == [gpu, gpu], "of several processes each has its own"
    assert capsys.readouterr().err == note.format("cuda:0")
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    assert devices_of(gpu) == [gpu, gpu] and capsys.readouterr().err == "", "rank 0 speaks for all"


TOO_MANY = {  # ranks with which a program cannot work
    "04_model_parallel/standalone.py": (3, "the 128 features between the layers cannot be divided by 3 ranks"),
    "04_model_parallel/standalone_layers.py": (5, "the 4 blocks cannot be divided among 5 ranks: start fewer"),
    "05_pipeline/standalone.py": (5, "the 4 blocks cannot be divided among 5 ranks: start fewer"),
}


@pytest.mark.parametrize("program", TOO_MANY)
def test_programs_refuse_ranks_among_which_they_cannot_divide(program, monkeypatch):
    ranks, said = TOO_MANY[program]
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    train = runpy.run_path(str(ROOT / program), run_name="borrowed")["train"]
    with pytest.raises(SystemExit) as refused:
        train(torch.device("cpu"))
    assert refused.value.code == said
