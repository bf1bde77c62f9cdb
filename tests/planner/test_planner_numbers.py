"""Numbers of the planner for layouts drawn at random, beside those that it gave before (numbers.jsonl).

A change that is not meant to move a number moves none. One that is says so by writing them anew, and the difference is
read (bytes worked out by hand: test_planner_bytes.py):

    python tests/planner/test_planner_numbers.py          the same layouts
    python tests/planner/test_planner_numbers.py 2        others, drawn with seed 2
"""

import json
import random
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from common.axes import AXES
from common.errors import UserError
from planner import adapters, hardware, models
from planner.constants import PRIOR
from planner.estimate import estimate
from planner.frameworks import FRAMEWORKS
from planner.layout import ATTENTION, PRECISIONS, RECOMPUTE, Layout, make_layout

NUMBERS = Path(__file__).with_name("numbers.jsonl")
GPUS = ("a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "gb200-nvl72", "v100-32gb", "l4", "cpu")
MODELS = ("gpt2", "gpt3-1.3b", "gpt3-13b", "pythia-6.9b", "llama-2-7b", "llama-3-8b", "llama-3-70b", "mixtral-8x7b",
          "deepseek-v3", "t5-3b", "bert-large", "qwen2.5-14b")  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
SAID = ("memory_gib_low", "memory_gib_high", "memory_phase", "memory_parts_gib", "step_parts_seconds", "bubble",
        "exposed_communication_seconds", "sent_bytes_per_gpu", "mfu", "fits", "trusted", "binding")  # fmt: skip


def numbers(model: str, gpu: str, gpus: int, network: str | None, mesh: dict, layout: dict) -> dict:
    """What `python -m planner estimate --json` says of a layout, to six digits. Raises UserError where it cannot be."""
    cluster = hardware.cluster(gpu, gpus, network=network)
    one = models.find(model)
    found = estimate(one, cluster, make_layout(one, cluster, mesh, **layout), PRIOR).as_dict()
    return {name: rounded(found[name]) for name in SAID}


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def drawn(source: random.Random) -> dict:
    """Some layout, that may not work."""
    mesh = dict.fromkeys(("data", "shard", "context", "expert", "tensor", "pipeline"), 1)
    for axis in source.choices([*mesh], (2, 3, 1, 2, 3, 3), k=source.randint(1, 3)):
        mesh[axis] = source.choice([2, 2, 4, 8, 16])
    gpus = 1
    for size in mesh.values():
        gpus *= size
    readers = mesh["data"] * mesh["shard"] * mesh["expert"]
    layout = {"micro_batch": source.choice([1, 1, 2, 4]), "sequence": source.choice([512, 2048, 4096])}
    layout["batch_size"] = readers * layout["micro_batch"] * source.choice([1, 4, 8, 64])
    layout["zero_stage"] = source.choice([0, 1, 2, 3, 3])
    some = {
        "schedule": SCHEDULES, "stages_per_rank": (2, 4), "recompute": RECOMPUTE[1:],
        "recompute_share": (0.25, 0.5), "precision": [*PRECISIONS], "offload": (True,), "sequence_parallel": (False,),
        "flash": (False,), "dropout": (True,), "fused": (False,), "fused_loss": (True,), "overlap_gradients": (False,),
        "async_tensor": (True,), "shard_context": (False,), "attention": ATTENTION, "balanced": (False,),
        "whole_experts": (True,), "ends": (True,), "framework": [*FRAMEWORKS], "lora": (8, 64),
        "lora_on": [*adapters.ON], "nf4": (True,),
    }  # fmt: skip
    layout |= {name: source.choice(some[name]) for name in source.sample([*some], source.randint(0, 6))}
    network = source.choice([None, None, *hardware.NETWORKS])
    return {"model": source.choice(MODELS), "gpu": source.choice(GPUS), "gpus": gpus, "network": network,
            "mesh": {axis: size for axis, size in mesh.items() if size > 1}, "layout": layout}  # fmt: skip


def words(case: dict) -> set[str]:
    """What a layout has: each of its settings but numbers of sequences, and each axis with each kind of setting."""
    settings = {key: value for key, value in case["layout"].items() if key not in ("batch_size", "sequence")}
    plain = {key: case[key] for key in ("model", "gpu", "network")} | case["mesh"] | settings
    ways = [*case["mesh"], *settings, f"ZeRO-{settings['zero_stage']}"]
    both = {f"{axis} with {way}" for axis in case["mesh"] for way in ways}
    return {f"{key} {value}" for key, value in plain.items()} | both


def draw(seed: int, often: int = 2) -> list[dict]:
    """Of 20,000 layouts those that work and have a setting that fewer than `often` before them have."""
    source, cases, seen = random.Random(seed), [], Counter()
    for _ in range(20_000):
        case = drawn(source)
        if any(seen[word] < often for word in words(case)):
            try:
                numbers(**case)
            except UserError:
                continue
            cases.append(case)
            seen.update(words(case))
    return cases


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
    cases = draw(int(sys.argv[1])) if sys.argv[1:] else [case for case, _ in stored()]
    NUMBERS.write_text("".join(json.dumps([case, numbers(**case)]) + "\n" for case in cases))
