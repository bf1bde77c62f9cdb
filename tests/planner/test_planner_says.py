"""What the planner's commands say: of every option, of every number that they print, of layouts drawn at random
(numbers.jsonl), beside what the library says, and beside what follows from their own --json.
"""

import json
import math
import re

import numpy as np
import pytest
from planner_cases import say, say_json
from test_planner_numbers import stored

from common.axes import AXES
from common.constants import GIB
from planner import explain_file, hardware, models, output, read_config, scoreboard
from planner.__main__ import named, parser, read
from planner.estimate import Estimate, estimate
from planner.explain import lines
from planner.layout import make_layout

FLAGS = ("offload", "ends", "whole_experts", "nf4")
LIBRARY = {"recompute_share", "shard_context"}  # of a layout, which no option says
CASES = [case for case, _ in stored() if not LIBRARY & {*case["layout"]}][::2]
USUAL = {"cpu": "float32", "v100-32gb": "fp16-mixed"}  # of other GPUs: bf16-mixed


def of(case: dict, framework: str = "torch", constants=None) -> Estimate:
    """With what the command line takes where nothing is said."""
    model, nodes = models.find(case["model"]), hardware.cluster(case["gpu"], case["gpus"], network=case["network"])
    usual = {"framework": framework, "precision": USUAL.get(case["gpu"], "bf16-mixed")}
    return estimate(model, nodes, make_layout(model, nodes, case["mesh"], **usual | case["layout"]), constants)


def line(case: dict) -> str:
    """The same as options."""
    mesh = ",".join(f"{axis}={size}" for axis, size in case["mesh"].items()) or "data=1"
    said = {name: case[name] for name in ("model", "gpu", "gpus", "network") if case[name]} | {"mesh": mesh}
    said |= {name: "yes" if value is True else "no" if value is False else value
             for name, value in case["layout"].items() if name not in FLAGS}  # fmt: skip
    flags = [name for name in FLAGS if case["layout"].get(name)]
    return " ".join([*(f"--{name} {value}" for name, value in said.items()), *(f"--{name}" for name in flags)]).replace(
        "_", "-")  # fmt: skip


def test_a_command_line_is_the_layout_of_its_options():
    for number, case in enumerate(CASES):
        command = ("estimate", "probe --seconds 1")[number % 2]
        assert named(read(f"{command} {line(case)}".split())) == of(case), line(case)
    seen = {word for case in CASES for word in line(case).split() if word.startswith("--")}
    options = {name for name in parser()[1]["estimate"]._option_string_actions if name not in ("-h", "--help")}
    shape = "layers width heads kv-heads mlp-width vocabulary experts top-k expert-width shared-experts head-width mlp"
    other = f"{shape} gpus-per-node adapters max-memory-gb constants recompute-layers json explain"
    assert options - seen <= {f"--{name}" for name in other.split()}, "which other tests look at"


def leaves(found) -> list:
    if isinstance(found, dict | list):
        return [leaf for one in (found.values() if isinstance(found, dict) else found) for leaf in leaves(one)]
    return [found]


UNITS = {"GiB": (1, GIB), "ms": (1e-3,), "%": (0.01,), "TFLOP/s": (1, 1e12), "GB": (1e9,), "h": (3600,), "min": (60,),
         "days": (86400,), "billion": (1e9,), "active": (1, 1e9)}  # fmt: skip


def unsaid(text: str, found, known: tuple = ()) -> list[str]:
    """Numbers that are printed, and are none of those of a --json as they are rounded: but for those in its texts."""
    values = [value for value in leaves(found) if isinstance(value, int | float)] + [*known]
    for word in sorted((word for word in leaves(found) if isinstance(word, str)), key=len, reverse=True):
        text = text.replace(word, " ") if len(word) > 2 else text
    wrong = []
    for digits, unit in re.findall(r"(?<![\w.^-])(\d[\d,]*(?:\.\d+)?) ?((?:[A-Za-z]+(?:/s)?\b|%)?)", text):
        number, last = float(digits.replace(",", "")), 0.500001 * 10.0 ** -len(digits.partition(".")[2])
        scales = UNITS.get(unit, (1,))
        if not any(abs(value - number * scale) <= last * scale for value in values for scale in scales):
            wrong.append(f"{digits} {unit}")
    return wrong


PRINTED = {  # and what else there is to say, of the command or always
    "plan --model llama-2-7b --gpu h100 --gpus 8 --batch-size 64": (64, 2048),
    "plan --model llama-3.2-1b --gpus 2 --batch-size 8 --sequence 1024": (10, 2025),
    "goodput --gpus 1024 --failures 1e-4 --checkpoint-seconds 30 --tokens 1e12 --tokens-per-second 1e6": (0.99, 1e6),
    "goodput --gpus 99 --failures 1e-3 --checkpoint-seconds 60 --interval-minutes 20 --spares 1": (0.99,),
    "models": [one.active_parameters for one in models.MODELS.values() if one.experts],
}  # fmt: skip


@pytest.mark.parametrize("command", PRINTED)
def test_what_is_printed_is_what_json_has(command):
    assert unsaid(say(command), say_json(command), (*range(1, 6), *PRINTED[command])) == []


def test_a_scoreboard_prints_its_scores():
    found = scoreboard.lines(source="torchtitan")
    text = scoreboard.text(scoreboard.scores(found)).partition("\n\n")[2]
    assert unsaid(text, scoreboard.scores(found), (90, 0.9, 2024, 2025)) == []


def test_the_numbers_of_an_estimate():
    """Those that are printed are in its --json, and these follow from each other and from the options."""
    gpus = hardware.GPUS
    for case in CASES:
        found, layout = of(case), case["layout"]
        said, tokens = found.as_dict(), layout["batch_size"] * layout["sequence"]
        assert unsaid(output.one_layout(found), said, (layout["batch_size"], layout["sequence"])) == [], line(case)
        steps, gib, parts = said["step_seconds"], said["memory_gib"], said["step_parts_seconds"]
        mesh, peaks = said["mesh"], {"fp8-mixed": "peak_fp8", "nvfp4-mixed": "peak_fp4"}
        peak = getattr(gpus[said["gpu"]], peaks.get(said["precision"], "peak"))
        if said["precision"] == "mxfp8-mixed":
            peak = gpus[said["gpu"]].peak_fp8 or gpus[said["gpu"]].peak
        assert math.prod(mesh.values()) == said["gpus"] == case["gpus"]
        readers = mesh["data"] * mesh["shard"] * mesh["expert"]
        assert said["micro_batches"] * said["micro_batch"] * readers == layout["batch_size"]
        assert (said["model"], said["parameters"]) == (case["model"], models.find(case["model"]).parameters)
        given = {name: layout[name] for name in {*layout} & {*said} - {"precision", "schedule"}}
        given |= {"lora_on": None} if "lora_on" in given and not said["lora"] else {}
        assert {name: said[name] for name in given} == given
        exact = {
            "tokens_per_second": tokens / steps, "tokens_per_second_per_gpu": tokens / steps / said["gpus"],
            "step_seconds": sum(parts.values()), "bubble": parts["bubble"] / steps, "exposed_communication_seconds":
            parts["messages in layers"] + parts["messages of state"], "mfu": 1e12 * said["model_tflops_per_gpu"] / peak,
        }  # fmt: skip
        assert {name: said[name] for name in exact} == pytest.approx(exact), line(case)
        assert said["step_seconds_low"] < steps < said["step_seconds_high"]
        assert said["memory_gib_low"] <= gib <= said["memory_gib_high"]
        room = said["memory_limit_gib"]
        assert said["fits"] == ("yes" if said["memory_gib_high"] <= room else
                                "tight" if said["memory_gib_low"] <= room else "no")  # fmt: skip
        assert not said["trusted"] or (gib <= 0.85 * room and not said["out_of_scope"])


def equations(text: str) -> list[tuple[str, float, float]]:
    """(an equation of numbers, what is left of its last sign, what is right of it)."""
    found = []
    for one in re.findall(r"(?:= )?((?:[\d,.]+|\() ?(?:[x/(]|\d)[\d,.x/ ()]*) = ([\d,.]+)", text):
        found.append((one, eval(one[0].replace(",", "").replace("x", "*")), float(one[1].replace(",", ""))))
    return found


def test_what_is_explained_adds_up():
    for case in CASES:
        found = of(case)
        explained = lines(found)
        sums = equations("\n".join(explained[:3]))
        assert len(sums) == 2 and all(left == right for _, left, right in sums), explained[:3]
        sizes = [float(one) for one in re.findall(r"(?m)^ +([\d.]+) GiB", "\n".join(explained))]
        assert sizes[-1] == pytest.approx(sum(sizes[:-1]), abs=0.006 * len(sizes)), "GiB of parts, and of all"
        ((factor, outside, whole),) = re.findall(r"x ([\d.]+) for .* \+ ([\d.]+) GiB .* = ([\d.]+) GiB",
                                                 "\n".join(explained))  # fmt: skip
        assert float(whole) == pytest.approx(float(factor) * sizes[-1] + float(outside), rel=0.006, abs=0.02)
        times = [float(one) for one in re.findall(r"(?m)^ +([\d.]+) s ", "\n".join(explained))]
        ((step,),) = [re.findall(r"^step +([\d.]+) s", one) for one in explained if one.startswith("step ")]
        assert float(step) == pytest.approx(sum(times), abs=0.0006 * (1 + len(times)))


def test_groups_of_ranks_are_those_of_the_mesh():
    """Ranks in their order, cut into the mesh: those that rank 0 shares an axis with, whether they are in a node."""
    for case in CASES:
        found = of(case)
        layout, nodes = found.layout, found.cluster
        grid = np.arange(nodes.gpus).reshape([layout.size(axis) for axis in AXES])
        shown = {one.split()[0]: one for one in explain_file.groups(layout, nodes) if "rank 0" in one}
        assert {*shown} == {axis for axis in AXES if layout.size(axis) > 1}
        for axis, text in shown.items():
            ranks = np.moveaxis(grid, AXES.index(axis), 0).reshape(layout.size(axis), -1)[:, 0]
            assert [int(one) for one in re.findall(r"\d+", text.partition("with")[2])] == list(ranks[:12]), text
            assert ("between" in text) == (len({*(ranks // nodes.gpus_per_node)}) > 1), text
        if layout.pipeline > 1:
            for one, stage in zip(explain_file.picture(layout, nodes)[:12], grid, strict=False):
                first, last = stage.min(), stage.max()
                assert f"ranks {first} to {last} " in one
                on = re.findall(r"\d+", re.findall(r"\((nodes? [^)]*)\)", one)[0])
                assert [int(number) for number in on] == sorted({int(r) // nodes.gpus_per_node for r in (first, last)})


def test_risks_are_said_where_there_are_any():
    for case in CASES:
        found = of(case)
        said, layout, told = found.as_dict(), found.layout, explain_file.risks(found, read_config.Config("none"))
        share = said["exposed_communication_seconds"] / said["step_seconds"]
        rules = {
            "runs out of memory": said["fits"] == "no", "may run out of memory": said["fits"] == "tight",
            "crosses nodes": layout.tensor > found.cluster.gpus_per_node, "of the step waits": share > 0.3,
            f"{said['micro_batches']} micro-batches for": 1 < layout.pipeline > said["micro_batches"],
            "float32: ": layout.precision == "float32" and case["gpu"] != "cpu",
        }  # fmt: skip
        assert {words: any(words in one for one in told) for words in rules} == rules, line(case)
        assert share <= 0.3 or any(one.startswith(f"{share:.0%} of the step") for one in told)


FILE = """[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\nmode = "none"
[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\nseq_len = 2048\n[compile]\nenable = true\n"""


def test_an_option_of_explain_wins_over_the_file(tmp_path):
    """What it says then is what `estimate` says of that layout, for every option that there is."""
    (tmp_path / "slow.json").write_text('{"constants": {"alpha_link": 0.001}}')
    (tmp_path / "run.toml").write_text(FILE)
    said = {"model": "llama-3-8b", "gpu": "h100", "gpus": 8, "batch-size": 64, "micro-batch": 2, "sequence": 2048,
            "zero-stage": 3, "recompute": "none", "precision": "bf16-mixed", "framework": "torch"}  # fmt: skip
    other = {"model": "llama-2-7b", "gpu": "a100", "gpus": 16, "batch-size": 128, "micro-batch": 4, "sequence": 4096,
             "zero-stage": 2, "recompute": "full", "precision": "fp8", "framework": "megatron", "gpus-per-node": 4,
             "network": "ethernet-100", "adapters": 2, "constants": tmp_path / "slow.json"}  # fmt: skip
    options = {name[2:] for name in parser()[1]["explain"]._option_string_actions if name.startswith("--")}
    assert options - {"help", "json", "format"} == {*other}
    found = {}
    for name, value in [("gpus", 8), *other.items()]:
        more = {"gpus-per-node": 4, "gpus": 16} if name in ("network", "adapters") else {}  # several nodes
        words = {"gpu": "h100", "gpus": 8} | more | {name: value}
        told = said | more | {name: value}
        one, two = (say_json(" ".join([command, *(f"--{n} {v}" for n, v in all_.items())])) | {"notes": []}
                    for command, all_ in ((f"explain {tmp_path / 'run.toml'}", words), (
                        f"estimate --mesh shard={told['gpus']} --fused-loss yes", told)))  # fmt: skip
        assert {key: one[key] for key in two} == two, name
        found[name, value] = one | {"risks": []}
    assert len({json.dumps(one) for one in found.values()}) == len(found), "each changes something"
