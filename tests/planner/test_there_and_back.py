"""`planner emit` for layouts drawn at random: each format's files mean, to the tool, the layout that was asked for, and
`planner explain` reads the same; or the tool lacks something, which is said in one line that names it.
"""

import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from emitted_files import READERS
from helpers import FULL

from common.axes import AXES
from common.errors import UserError
from planner import emit, explain_file, hardware, models, read_config
from planner.estimate import Estimate, estimate
from planner.layout import PRECISIONS, RECOMPUTE, Layout, make_layout

pytestmark = pytest.mark.xdist_group("there and back")  # which draw once

SOME = {  # of a setting, values that are not the usual one
    "recompute": RECOMPUTE[1:], "precision": [*PRECISIONS], "offload": (True,), "sequence_parallel": (False,),
    "overlap_gradients": (False,), "fused": (False,), "fused_loss": (True,), "flash": (False,), "dropout": (True,),
    "schedule": ("gpipe", "zbv", "zb-h1"), "stages_per_rank": (2,), "async_tensor": (True,), "whole_experts": (True,),
    "ends": (True,), "recompute_layers": (2,),
}  # fmt: skip
# What each tool has, by its documentation: axes, stages of ZeRO, models, and values of SOME.
LLAMAS = "llama-3-8b llama-3.2-1b mixtral-8x7b"
ANY = f"gpt2-xl qwen3-32b {LLAMAS}"
BYTES = "float32 bf16-mixed fp16-mixed"
HAS = {
    "torchrun": ("data shard context expert tensor pipeline", "0123", ANY, f"{BYTES} selective products full offload "
                 "sequence_parallel overlap_gradients fused flash gpipe zbv zb-h1 stages_per_rank"),
    "accelerate": ("data shard context", "023", ANY, f"{BYTES} full offload"),
    "deepspeed": ("data shard", "0123", ANY, f"{BYTES} full offload overlap_gradients"),
    "hf-trainer": ("data shard", "0123", ANY, f"{BYTES} full offload"),
    "torchtitan": ("data shard context tensor pipeline", "023", "llama-3-8b qwen3-32b", "float32 bf16-mixed fp8-mixed "
                   "selective operators every-second full offload fused fused_loss async_tensor gpipe zbv "
                   "stages_per_rank ends"),
    "megatron": ("data shard context expert tensor pipeline", "0123", ANY, f"{BYTES} bf16-mixed-16 "
                 "fp8-mixed mxfp8-mixed nvfp4-mixed selective attention full sequence_parallel overlap_gradients flash "
                 "dropout async_tensor whole_experts ends stages_per_rank recompute_layers"),
    "nanotron": ("data shard context expert tensor pipeline", "01", LLAMAS, "float32 bf16-mixed bf16 full gpipe "
                 "sequence_parallel"),
}  # fmt: skip
HAS["slurm"] = ("data shard", "03", "llama-3-8b", "")  # torchrun's, in a job
NODE = hardware.cluster("b200", 1)
BASE = estimate(models.find("gpt2"), NODE, make_layout(models.find("gpt2"), NODE, {}, batch_size=1))


def drawn(source: random.Random, tool: str) -> Estimate:
    """Some layout, mostly of what the tool has. Raises UserError where it cannot work. (Of the estimate, its files say
    no more than the head of one.)"""
    axes, stages, names, values = (words.split() for words in HAS[tool])
    mesh = dict.fromkeys(AXES, 1)
    for axis in source.choices(axes if source.random() < 0.9 else AXES, k=source.choice([0, 1, 1, 2, 2, 3])):
        mesh[axis] = source.choice([2, 2, 4])
    gpus = math.prod(mesh.values())
    some = {name: [value for value in every if str(value if isinstance(value, str) else name) in values] for name, every
            in SOME.items()} if source.random() < 0.8 else SOME  # fmt: skip
    kinds = [name for name, every in some.items() if every]
    chosen = source.sample(kinds, min(len(kinds), source.choice([0, 1, 1, 2, 3])))
    fields = {name: source.choice(some[name]) for name in chosen}
    if "recompute_layers" in fields:
        fields["recompute"] = "full"
    micro, stage = source.choice([1, 2, 4]), source.choice(stages[0] if source.random() < 0.9 else "0123")
    fields |= {"micro_batch": micro, "sequence": source.choice([512, 2048]), "zero_stage": int(stage)}
    fields["batch_size"] = mesh["data"] * mesh["shard"] * mesh["expert"] * micro * source.choice([1, 2, 3, 8])
    model = models.find(source.choice(names if source.random() < 0.9 else ANY.split()))
    nodes = hardware.cluster("b200", gpus, min(gpus, source.choice([4, 8])))
    return replace(BASE, model=model, cluster=nodes, layout=make_layout(model, nodes, mesh, **fields))


def words(one: Estimate) -> set[str]:
    """What a layout has: axes, each with its stage, and settings that are not the usual ones."""
    layout, usual = one.layout, Layout((), 1)
    axes = [axis for axis, size in layout.mesh if size > 1]
    found = {one.model.name, *axes, *(f"{axis} ZeRO-{layout.zero_stage}" for axis in axes), f"ZeRO-{layout.zero_stage}"}
    settings = ["recompute_layers"] if layout.recompute_share < 1 else []
    for name in SOME.keys() - {"recompute_layers"}:
        if (value := getattr(layout, name)) != getattr(usual, name) or name == "precision":
            settings.append(value if isinstance(value, str) else name)
    return found | {*settings, *(" with ".join(sorted(pair)) for pair in combinations(settings, 2))}


@cache
def draw(tool: str, seed: int = 3, often: int = 2, tries: int = 4000 if FULL else 1200) -> list[tuple]:
    """Layouts of which each has something that fewer than `often` before them have, and what is emitted for them, or
    the error."""
    source, found, seen = random.Random(seed), [], {True: Counter(), False: Counter()}
    for _ in range(tries):
        try:
            one = drawn(source, tool)
        except UserError:
            continue
        has = {word for word in words(one) if " with " not in word or tool not in ("torchrun", "slurm")}  # to save time
        if all(seen[True][word] >= often for word in has):
            continue
        try:
            files = emit.emit(one, tool)
        except UserError as error:
            files = error
        kind = not isinstance(files, UserError)
        if any(seen[kind][word] < often for word in has):
            found.append((one, files))
            seen[kind].update(has)
    return found


def parameters(one: Estimate) -> int:
    """Of its model, with a position for each token of the sequence."""
    positions = one.model.positions and max(one.model.positions, one.layout.sequence)
    return replace(one.model, positions=positions).parameters


def again(layout: Layout, tool: str) -> str:
    """What is computed again. Of what lies between all and nothing, the course has one kind."""
    return "products" if tool in ("torchrun", "slurm") and layout.kept not in ("none", "full") else layout.kept


def asked(one: Estimate, tool: str) -> dict:
    """What the layout says, in the words of a reader; None for what means nothing there. Without a stage of ZeRO, all
    readers have copies."""
    layout, cluster, model = one.layout, one.cluster, one.model
    mesh = dict(layout.mesh)
    if layout.zero_stage == 0:
        mesh |= {"data": mesh["data"] * mesh["shard"], "shard": 1}
    names = ("micro_batch", "micro_batches", "batch_size", "sequence", "precision", "offload", "fused", "fused_loss",
             "async_tensor", "dropout", "flash", "overlap_gradients", "schedule", "stages",
             "stages_per_rank", "ends")  # fmt: skip
    each = round(layout.recompute_share * model.layers / layout.stages)
    return {name: getattr(layout, name) for name in names} | {
        "mesh": mesh, "zero_stage": layout.zero_stage if layout.shards > 1 else None, "recompute": again(layout, tool),
        "nodes": cluster.nodes, "world": cluster.gpus, "parameters": parameters(one),
        "layers": model.layers, "width": model.width, "experts": model.experts, "top_k": model.top_k,
        "sequence_parallel": layout.sequence_parallel if layout.tensor > 1 else None,
        "whole_experts": layout.whole_experts and layout.tensor > 1,
        "again": each if layout.recompute_share < 1 else None,
    }  # fmt: skip


@pytest.mark.parametrize("tool", emit.FORMATS)
def test_it_means_what_was_asked_for(tool, tmp_path):
    found = [(one, files) for one, files in draw(tool) if not isinstance(files, UserError)]
    for number, (one, files) in enumerate(found[-12:] if tool == "slurm" else found):  # whose settings are torchrun's
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.files.items():
            (folder / name).write_text(text)
        means, wanted = READERS[tool](files.command, files.files, folder), asked(one, tool)
        means["mesh"] = dict.fromkeys(AXES, 1) | means["mesh"]
        wrong = {name: (value, wanted[name]) for name, value in means.items() if wanted[name] not in (value, None)}
        assert not wrong, f"{tool}, {one.model.name}: (what it means, what was asked for) of {one.layout}"
    axes, stages, names, values = HAS[tool]
    there = {word for one, _ in found for word in words(one)}
    missing = {*axes.split(), *names.split(), *values.split(), *(f"ZeRO-{stage}" for stage in stages)} - there
    assert not missing, f"{missing}: no layout that was emitted has it"


@pytest.mark.parametrize("tool", emit.FORMATS)
def test_what_a_tool_has_not_is_refused(tool):
    """In one line that names the tool, and the field or the axis or what to take instead."""
    errors = [(one.layout, str(error)) for one, error in draw(tool) if isinstance(error, UserError)]
    assert errors
    for layout, said in errors:
        axes = {axis for axis, size in layout.mesh if size > 1}
        there = {*axes, "model", "--mesh", *map(str, vars(layout).values()), *(f"--{name.replace('_', '-')}" for name in
                 ("zero_stage", *SOME))}  # fmt: skip
        assert said.startswith(f"--format {tool}: ") and "\n" not in said, said
        assert any(word in said for word in there), said


SAME = ("micro_batch", "micro_batches", "batch_size", "sequence", "recompute_share", "precision", "offload", "stages")
UNSAID = {"deepspeed": ("sequence", "recompute"), "accelerate": ("sequence", "recompute", "batch_size", "micro_batch"),
          "hf-trainer": ("sequence", "recompute")}  # fmt: skip
MAIN = {"torchrun": "course.yaml", "accelerate": "accelerate.yaml", "deepspeed": "deepspeed.json",
        "hf-trainer": "training.json", "torchtitan": "torchtitan.toml", "megatron": "megatron.sh",
        "nanotron": "nanotron.yaml"}  # fmt: skip


def plain(layout: Layout, tool: str) -> dict:
    """A layout's numbers, the same for all that are alike: state on one rank is not divided, and so on."""
    mesh, divided = dict(layout.mesh), layout.zero_stage if layout.shards > 1 else 0
    if not divided:
        mesh |= {"data": mesh["data"] * mesh["shard"], "shard": 1}
    return {name: getattr(layout, name) for name in SAME} | {
        "mesh": mesh, "divided": divided, "schedule": layout.pipeline > 1 and layout.schedule,
        "kept": again(layout, tool), "ends": layout.ends,
        "whole_experts": layout.whole_experts and layout.tensor > 1,
    }  # fmt: skip


@pytest.mark.parametrize("tool", MAIN)
def test_explain_reads_it_back(tool, tmp_path):
    for one, files in draw(tool):
        if isinstance(files, UserError):
            continue
        name = "deepspeed.json" if "deepspeed.json" in files.files else MAIN[tool]
        (tmp_path / name).write_text(files.files[name])
        config = read_config.read(str(tmp_path / name))
        given = {field: getattr(one.layout, field) for field in UNSAID.get(tool, ())}
        read = explain_file.layout_of(config, one.model, one.cluster, given)
        assert plain(read, tool) == plain(one.layout, tool), f"{name} of {one.model.name}, {one.layout.describe()}"
        assert config.gpus in (None, one.cluster.gpus)
        if config.model:
            assert (config.model.experts, config.model.top_k) == (one.model.experts, one.model.top_k)
        if config.model and tool != "torchrun":  # whose GPT has a vocabulary of its own
            assert config.model.parameters == pytest.approx(parameters(one), rel=1e-4)
