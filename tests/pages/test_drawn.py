"""Whole pictures against what they should show, line by line. drawn.txt and drawn_first.txt beside this file were read
line by line against the numbers that the pictures are given here; the pictures of a plan have numbers of their own
instead of the planner's."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from drawn import drawn

from common import ROOT
from common.lab import plotting
from course.ddp import buckets, checkpoint_cost
from course.fsdp import calculator, decision_map
from course.intro import networks, overview


class Timeline:
    ranks = [
        [(0, 1, (0, "F", 1)), (3, 4, (0, "I", 1)), (4, 5, (0, "W", 1))],
        [(1, 2, (1, "F", 1)), (2, 3, (1, "B", 1))],
    ]

    def stored(self, rank):
        return [[(0, 2), (4, 1), (5, 0)], [(1, 1), (3, 0)]][rank]


def all_reduce():
    """8 and 2 ms for each node; nothing for bytes."""
    algorithms = {"ring": lambda n, nodes: 8e-3 * nodes, "tree": lambda n, nodes: 2e-3 * nodes}
    lab = networks.AllReduceLab(algorithms, lambda nodes, *_: nodes)
    return lab.draw(size=networks.MiB, nodes=2, alpha_in=3, alpha_out=6, link_out=12.5)


def quartiles():
    rows, lines = [(2e-6, 3e-6, 7e-6), (4e-6, 5e-6, 6e-6)], (1e-6, 1e-9)
    return networks.line([10, 1000], {"a": rows, "b": rows}, {"a": lines, "b": lines}, "a title")


def plans():
    """Two layouts on a GPU of 80 GiB: 1 to 6, and 20 to 25 GiB; a step of 10 s."""
    sizes = {name: [1 + place, 20 + place] for place, name in enumerate(calculator.GROUPS)}
    rows = {
        f"plan {number}": SimpleNamespace(
            number=number, cluster=SimpleNamespace(gpu=SimpleNamespace(memory=80 * 2**30)), seconds=10.0,
            step=SimpleNamespace(parts={"optimizer": 2.0}),
        )
        for number in range(2)
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calculator, "grouped", lambda found: {name: both[found.number] for name, both in sizes.items()})
        patch.setattr(calculator, "messages", lambda found: (3.0, 1.0))
        return calculator.draw(rows)


def memory_of_a_step():
    kinds, mib = ("parameters", "gradients", "optimizer", "buffers", "activations"), 2**20
    held = [(1, 0, 2, 1, 3), (1, 1, 2, 1, 5), (1, 1, 2, 1, 4), (1, 1, 2, 1, 0), *[(1, 1, 2, 0, 0)] * 4]
    lines = [dict(zip(kinds, (size * mib for size in sizes), strict=True)) for sizes in held]
    return calculator.draw_steps({"one": (lines, 1)})


def decisions():
    cells = {
        ("small", 8): {"kind": "DDP, ZeRO-1, ZeRO-2", "layout": "Z1", "mfu": "0.456", "later": "0.050"},
        ("small", 1024): {"kind": "tensor", "layout": "T8 Z1", "mfu": "0.3", "later": "0.051"},
        ("large", 8): {"kind": "does not fit"},
        ("large", 1024): {"kind": "ZeRO-3 (FSDP)", "layout": ""},
    }
    return decision_map.draw_rows(cells, "a network", "GPUs of a kind")


ROWS = [["0", "1 2", "-15", "0.5"], ["0", "3 4", "-87", "0.5"]]  # weight, examples, gradient, new weight
RUN = {"computed": [(5.0, 5.2), (5.0, 5.3)], "reduced": [(5.1, 5.25), (5.28, 5.34)]}
PICTURES = {
    "collective": lambda: plotting.collective([[[11, None], [2]], [[13], [20]]], ("start", "end"), title="a sum"),
    "timeline": lambda: plotting.timeline([(0, "send", 7.0, 7.002), (1, "add", 7.001, 7.004)], title="two ranks"),
    "pipeline": lambda: plotting.pipeline({"a pipeline": Timeline()}, unit="ms"),
    "pipeline without memory": lambda: plotting.pipeline({"a pipeline": Timeline()}, memory=False),
    "cluster": lambda: networks.cluster(450, 63, 50, nodes=2, gpus=1),
    "line": quartiles,
    "all-reduce": all_reduce,
    "layout of buckets": lambda: buckets.draw_layout(["c", "b", "a"], [400, 8, 1000], [[0, 1], [2]]),
    "backward passes": lambda: buckets.draw_runs({"after": buckets.Pass(**RUN), "hooks": buckets.Pass(**RUN)}),
    "overlap": lambda: buckets.draw_overlap(400, 200, 1.0, 12.5),
    "bars": lambda: buckets.draw_bars({"a": (["x", "y"], [[1.0, 2.0, 6.0], [4.0]]), "b": (["z"], [[2.0]])}, "loss"),
    "plans": plans,
    "memory of a step": memory_of_a_step,
    "decisions": decisions,
    "own gradients": lambda: overview.step_pictures(ROWS, "-102", "-51")[2],
    "summed gradients": lambda: overview.step_pictures(ROWS, "-102", "-51")[3],
    "state": lambda: overview.state_bars([1e9, 7e9], recipe=(2, 3, 12), gpu=80e9),
    "shares": lambda: overview.share_bars({"fast": [0.1, 0.02], "slow": [0.5, 0.25]}, ["few", "many"]),
    "checkpoints": lambda: checkpoint_cost.draw(cost=0.5, mtbf=180.0, restart=10.0),
}


def options(lab) -> dict[str, tuple]:
    return {name: (control.description, control.value, getattr(control, "options", None) and
                   [option if isinstance(option, str | int | float) else option[0] for option in control.options])
            for name, control in lab.controls.items()}  # fmt: skip


def test_sliders_offer_and_begin_with():
    offered = options(networks.AllReduceLab({"ring": lambda n, _: 1.0}, lambda *asked: None))
    sizes = ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB", "256 MiB", "1 GiB", "4 GiB"]
    powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert offered == {
        "size": ("tensor", 64 * 1024 * 1024, sizes), "nodes": ("nodes", 128, powers),
        "alpha_in": ("α in node, µs", 3, [1, 2, 3, 5, 10]),
        "alpha_out": ("α between, µs", 6, [1, 2, 3, 6, 10, 20, 50, 100]),
        "link_out": ("GB/s per GPU", 50, [0.125, 0.3125, 1.5625, 3.125, 6.25, 12.5, 25, 50, 100]),
    }, "label, first value and values of each slider of an all-reduce"  # fmt: skip
    offered = options(buckets.BucketLab())
    assert offered == {
        "bucket_mb": ("bucket (MiB)", 25, [16, 25, 50, 100, 200, 400, 800, 1200]),
        "backward_ms": ("backward (ms)", 200, [20, 50, 100, 200, 500, 1000]),
        "alpha_ms": ("latency (ms)", 1.0, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]),
        "bandwidth_gb": ("GB/s", 12.5, [1.25, 2.5, 5, 12.5, 25, 50, 100, 200, 400]),
    }, "label, first value and values of each slider of buckets"  # fmt: skip
    offered = options(calculator.Calculator())
    models = ["llama-3.2-1b", "llama-7b", "llama-13b", "llama-33b", "llama-2-70b", "llama-3-405b"]
    assert offered == {
        "model": ("model", "llama-7b", models), "gpus": ("GPUs", 8, powers),
        "stage": ("stage", 3, ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)"]),
        "precision": ("precision", "bf16-mixed", ["float32", "bf16-mixed", "fp16-mixed", "bf16"]),
        "sequence": ("sequence", 4096, [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]),
        "micro_batch": ("micro-batch", 1, [1, 2, 4, 8, 16, 32]),
        "recompute": ("recompute", "none", ["none", "attention", "operators", "products", "every-second", "full"]),
        "offload": ("offload", False, None),
    }, "label, first value and values of each control of the calculator"  # fmt: skip
    assert calculator.STAGES == {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3 (FSDP)": 3}
    plt.close("all")


def expected(name: str) -> list[str]:
    text = "\n".join((ROOT / "tests" / "pages" / file).read_text() for file in ("drawn.txt", "drawn_first.txt"))
    return text.partition(f"===== {name}\n")[2].partition("\n=====")[0].splitlines()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_all_that_it_should(name):
    shown, wanted = drawn(PICTURES[name]()), expected(name)
    plt.close("all")
    missing, more = ([line for line in one if line not in other] for one, other in ((wanted, shown), (shown, wanted)))
    said = "\n".join(["missing:", *missing, "instead:", *more])
    assert shown == wanted, f"the picture of {name} (tests/drawn*.txt); in it is {said}"
