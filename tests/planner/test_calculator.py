"""The calculator and the map of chapter 06 show what the planner says, and nothing else."""

import json
import re

import pytest
from planner_cases import mesh_of

from common import ROOT
from common.constants import GIB
from planner import calculator, decision_map, hardware, models
from planner.estimate import estimate
from planner.layout import Layout, make_layout


@pytest.mark.parametrize("stage", calculator.STAGES.values())
def test_its_bars_add_up_to_the_planners_memory(stage):
    model, cluster = models.find("llama-7b"), hardware.cluster("h100-80gb", 8)
    mesh = {"shard" if stage else "data": 8}
    layout = make_layout(model, cluster, mesh, batch_size=32, micro_batch=2, sequence=2048, zero_stage=stage,
                         recompute="full", framework="torch")  # fmt: skip
    said = estimate(model, cluster, layout)
    shown = calculator.ask("llama-7b", 8, stage, micro_batch=2, accumulation=2, sequence=2048, recompute="full")
    assert sum(calculator.grouped(shown).values()) == pytest.approx(said.memory.needed / GIB)
    assert shown.seconds == said.seconds


def test_every_part_of_the_planner_is_in_one_group():
    parts = [part for group in calculator.GROUPS.values() for part in group]
    assert len(parts) == len(set(parts))
    for fields in ({}, {"recompute": "full"}, {"offload": True}, {"precision": "float32"}):
        for gpus in (1, 8):
            found = calculator.ask("llama-7b", gpus, 3, **fields)
            assert set(found.memory.parts) <= set(parts)


def test_messages_are_hidden_or_exposed():
    near, far = (calculator.ask("llama-7b", gpus, 3) for gpus in (8, 64))
    for found in (near, far):
        hidden, exposed = calculator.messages(found)
        assert exposed == found.step.exposed and hidden > 0, "gathering is hidden behind work"
    assert sum(calculator.messages(far)) > sum(calculator.messages(near))  # they leave the node
    assert calculator.messages(calculator.ask("llama-7b", 1, 0)) == (0.0, 0.0)


def test_what_is_shown_is_said_in_numbers_and_errors_are_explained():
    """That every control redraws is shown for all pages in tests/pages/test_site_sliders.py."""
    sliders = calculator.Calculator()
    for name, gpus, stage in (("llama-7b", 8, 3), ("llama-13b", 64, 1)):
        for control, value in (("model", name), ("gpus", gpus), ("stage", stage)):
            sliders.controls[control].value = value
        found = calculator.ask(name, gpus, stage)
        for number in (f"{found.memory.high / GIB:.0f} GiB", f"{found.seconds:.2f} s", f"{100 * found.mfu:.0f}%"):
            assert number in sliders.text.value, "memory, time and MFU of what is shown"
    sliders.controls["model"].options = [*calculator.MODELS, "llama-8"]
    sliders.controls["model"].value = "llama-8"
    assert "llama-8" in sliders.text.value and sliders.picture.layout.display == "none"


def test_the_map_is_whole_and_what_the_planner_says():
    rows, network = decision_map.stored(), next(iter(decision_map.NETWORKS))
    assert rows.keys() == {(name, model, gpus) for name in decision_map.NETWORKS for model in decision_map.MODELS
                           for gpus in decision_map.GPUS}  # fmt: skip
    assert {row["kind"] for row in rows.values()} <= decision_map.LAYOUT_KINDS.keys()
    for model, gpus in (("llama-3.2-1b", 8),):
        found, said = decision_map.cell(model, gpus, network), rows[network, model, gpus]
        assert found == {name: value for name, value in said.items() if value}


KINDS = [  # layouts of a kind: mesh and fields
    [("data=8", {}), ("shard=8", {"zero_stage": 2})],
    [("shard=8", {"zero_stage": 3}), ("data=4 shard=2", {"zero_stage": 3})],
    [("shard=4 tensor=2", {"zero_stage": 3}), ("shard=4 context=2", {"zero_stage": 1})],
    [("pipeline=8", {})],
    [("pipeline=4 data=2 tensor=2", {}), ("pipeline=2 shard=2 context=2", {"zero_stage": 1})],
    [("shard=8", {"zero_stage": 3, "offload": True}), ("pipeline=2 shard=4", {"zero_stage": 1, "offload": True})],
]


def test_layouts_have_kinds_and_short_names():
    """Layouts of a kind have its colour, and each has a name with what a cell leaves open: sizes, copies, stage."""
    kinds = []
    for alike in KINDS:
        layouts = [Layout(tuple(mesh_of(text).items()), 64, **fields) for text, fields in alike]
        (kind,) = {decision_map.kind_of(layout) for layout in layouts}
        assert kind in decision_map.LAYOUT_KINDS and len({*map(decision_map.short, layouts)}) == len(layouts)
        kinds.append(kind)
        for layout in layouts:
            axes = ["pipeline", "context", "tensor", *["data"] * (layout.zero_stage > 0)]
            numbers = [layout.size(axis) for axis in axes if layout.size(axis) > 1]
            told = sorted(map(int, re.findall(r"\d+", decision_map.short(layout))))
            assert told == sorted([*numbers, *[layout.zero_stage] * (layout.zero_stage > 0)])
    assert len({*kinds}) == len(KINDS)


def notebook_text(name: str) -> str:
    cells = json.loads((ROOT / "06_fsdp" / name).read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def test_the_calculators_alt_text_is_of_what_it_first_shows():
    (alt,) = re.findall(r'Calculator\(\)\.show\(alt="([^"]+)"', notebook_text("03_fitting_in.ipynb"))
    shown = {name: control.value for name, control in calculator.Calculator().controls.items()}
    stage = next(name for name, number in calculator.STAGES.items() if number == shown["stage"])
    facts = (shown["model"].removeprefix("llama-").upper(), stage.split()[0].strip(","), f"{shown['gpus']} GPUs")
    assert not [fact for fact in facts if fact not in alt], alt
