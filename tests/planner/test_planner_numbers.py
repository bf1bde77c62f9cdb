"""Numbers of the planner for layouts that were drawn at random, beside those that it gave before (numbers.jsonl).

A change that is not meant to move a number moves none. One that is says so by writing them anew, and the difference is
read (bytes worked out by hand: test_planner_bytes.py). A layout more is a line with its case and {}:

    python tests/planner/test_planner_numbers.py
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from common.axes import AXES
from planner import hardware, models
from planner.constants import PRIOR
from planner.estimate import estimate
from planner.layout import Layout, make_layout

NUMBERS = Path(__file__).with_name("numbers.jsonl")
SAID = ("memory_gib_low", "memory_gib_high", "memory_phase", "memory_parts_gib", "step_parts_seconds", "bubble",
        "exposed_communication_seconds", "sent_bytes_per_gpu", "mfu", "fits", "trusted", "binding")  # fmt: skip


def numbers(model: str, gpu: str, gpus: int, network: str | None, mesh: dict, layout: dict) -> dict:
    """What `python -m planner estimate --json` says of a layout, to six digits."""
    cluster = hardware.cluster(gpu, gpus, network=network)
    one = models.find(model)
    found = estimate(one, cluster, make_layout(one, cluster, mesh, **layout), PRIOR).as_dict()
    return {name: rounded(found[name]) for name in SAID}


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def stored() -> list[list[dict]]:
    return [json.loads(line) for line in NUMBERS.read_text().splitlines()]


def differences(before, now, name: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [line for key in keys for line in differences(before.get(key), now.get(key), f"{name} {key}".strip())]
    near = isinstance(before, float) and isinstance(now, float) and before == pytest.approx(now, rel=2e-5, abs=1e-12)
    return [] if near or before == now else [f"{name}: {before} -> {now}"]


def test_every_setting_and_axis_is_there():
    cases = [case for case, _ in stored()]
    assert {name for case in cases for name in case["layout"]} | {"mesh", "notes"} == {f.name for f in fields(Layout)}
    assert {axis for case in cases for axis in case["mesh"]} == set(AXES)


def test_numbers_are_those_of_before():
    moved = {json.dumps(case): differences(before, numbers(**case)) for case, before in stored()}
    moved = {case: lines for case, lines in moved.items() if lines}
    assert not moved, f"of {len(stored())} layouts {len(moved)} have other numbers; if they should: {__doc__}"


if __name__ == "__main__":
    NUMBERS.write_text("".join(json.dumps([case, numbers(**case)]) + "\n" for case, _ in stored()))
