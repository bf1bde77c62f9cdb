"""The pictures of the first notebook, number by number."""

import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Polygon
from matplotlib.text import Annotation

from common.lab.plotting import ORANGE, PALETTE, SKY
from course.intro import networks, overview
from course.intro.costs import steps


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt.close("all")


def test_messages_of_a_collective_in_a_ring_of_four():
    assert {name: steps(name, 4) for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")} == {
        "all_reduce": 6, "all_gather": 3, "reduce_scatter": 3, "broadcast": 3, "reduce": 3,
    }, "messages that follow each other: 4 - 1 for once around the ring, twice for an all-reduce"  # fmt: skip
    assert [steps(name, 4) for name in ("send", "recv", "barrier")] == [1, 0, 0], "a send's message is counted once"


def test_five_moments_of_a_step():
    rows = [["0", "1 2", "-15", "0.5"], ["0", "3 4", "-87", "0.5"]]
    shown = []
    for fig in overview.step_pictures(rows, total="-102", mean="-51"):
        ax = fig.axes[0]
        titles = [text.get_text() for text in ax.texts][:4]
        assert titles == ["weight", "examples", "gradient", "new weight"]
        boxes = [text.get_text() for text in ax.texts[4:] if text.get_text()]
        thick = sorted({round(patch.get_x() / 2.2) for patch in ax.patches if patch.get_linewidth() == 3.5})
        shown.append((boxes, thick, sum(isinstance(text, Annotation) for text in ax.texts)))
        filled = [(round(box.get_x(), 1), box.get_y(), to_hex(box.get_facecolor()).upper())
                  for box in ax.patches if box.get_facecolor()[3]]  # fmt: skip
    minus = "\N{MINUS SIGN}"
    assert shown == [
        (["rank 0", "0", "rank 1", "0"], [0], 0),
        (["rank 0", "0", "1 2", "rank 1", "0", "3 4"], [1], 0),
        (["rank 0", "0", "1 2", f"{minus}15", "rank 1", "0", "3 4", f"{minus}87"], [2], 0),
        (["rank 0", "0", "1 2", f"{minus}102", "rank 1", "0", "3 4", f"{minus}102"], [2], 2),
        (["rank 0", "0", "1 2", f"{minus}51", "0.5", "rank 1", "0", "3 4", f"{minus}51", "0.5"], [2, 3], 0),
    ], "for each moment: the boxes, the columns that are new, and the arrows of the all-reduce"
    of_ranks = [(x, y, colour) for x, y, colour in filled if colour != "#E8E8E8"]
    assert of_ranks == [
        (2.2, 0.0, SKY), (4.4, 0.0, SKY), (5.2, 0.0, ORANGE), (2.2, 1.9, ORANGE), (4.4, 1.9, SKY), (5.2, 1.9, ORANGE),
    ], "examples in their rank's colour, the mean of both ranks' gradients in two"  # fmt: skip


def test_the_bytes_of_a_models_state_beside_a_gpus():
    ax = overview.state_bars([1e9, 7e9], recipe=(2, 3, 12), gpu=80e9).axes[0]
    bars = [(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in ax.patches]
    assert bars == [(0, 2), (0, 14), (2, 3), (14, 21), (5, 12), (35, 84)], "gigabytes, one kind beside the other"
    assert [text.get_text() for text in ax.texts] == ["17 GB", "119 GB", "one GPU: 80 GB"]
    assert list(ax.lines[0].get_xdata()) == [80, 80], "the line of the GPU's memory"
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["1 billion", "7 billion"]
    names = [text.get_text().split(":")[0] for text in ax.get_legend().get_texts()]
    assert names == ["parameters", "gradients", "AdamW"], "names of the three kinds of bytes, in the recipe's order"
    assert ax.yaxis_inverted() and "(GB)" in ax.get_xlabel()


ROWS, COLUMNS, EVERY = ["0000", "1111", "2222", "3333"], ["0123"] * 4, ["...."] * 4
HELD = {  # by which rank: layers down and width across, examples down and tokens across; "." by every rank
    "data": (EVERY, ROWS, "gradients"),
    "sharded data (ZeRO, FSDP)": (COLUMNS, ROWS, "parameters and gradients"),
    "tensor": (COLUMNS, EVERY, "activations, in each layer"),
    "pipeline": (ROWS, None, "activations, between layers"),
    "context (sequence)": (EVERY, COLUMNS, "keys and values; gradients"),
    "expert": (["....", "0123", "....", "0123"], ROWS, "tokens, to their experts; gradients"),
}


def test_who_holds_what_in_six_ways_to_divide():
    figure = overview.ways_to_divide()
    axes, (legend,) = figure.axes, figure.legends
    shown = {text.get_text(): (to_hex(handle.get_facecolor()).upper(), handle.get_hatch())
             for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}  # fmt: skip
    assert legend.get_title().get_text() == "held by" and shown == {
        **{f"rank {rank}": (PALETTE[rank].upper(), None) for rank in range(4)}, "all ranks": ("#D9D9D9", None),
        "hatched: only stored there": ("#FFFFFF", "///"),
    }, "the legend: who holds what, and what hatched means"  # fmt: skip
    assert [ax.get_title() for ax in axes] == list(HELD)
    for ax, (way, (of_model, of_batch, sent)) in zip(axes, HELD.items(), strict=True):
        words = [text.get_text() for text in ax.texts]
        assert f"sent: {sent}" in words, f"{way}: what is sent"
        below = "batch\nexamples ↓  tokens →" if of_batch else "batch: inputs on rank 0,\ntargets on rank 3"
        named = [word for word in words if word.startswith(("model", "batch"))]
        assert named == ["model\nlayers ↓  width →", below], f"{way}: what is divided, and along what"
        grids = ["".join(text or "." for text in words[:16])]
        if of_batch:
            grids.append("".join(text or "." for text in words[17:33]))
            assert grids[1] == "".join(of_batch), f"{way}: which rank holds which part of the batch"
        assert grids[0] == "".join(of_model), f"{way}: which rank holds which part of the model"
        hatched = {patch.get_hatch() for patch in ax.patches[:16]}
        assert hatched == {"///" if "ZeRO" in way else None}, f"{way}: hatched is what is only stored there"
        colours = [to_hex(patch.get_facecolor()).upper() for patch in ax.patches[:16]]
        ranks = {str(rank): colour.upper() for rank, colour in enumerate(PALETTE[:4])} | {".": "#D9D9D9"}
        assert colours == [ranks[owner] for owner in grids[0]], f"{way}: colours of the ranks"
    triangles = [patch for patch in axes[3].patches if isinstance(patch, Polygon)]
    colours = [to_hex(patch.get_facecolor()) for patch in triangles[:2]]
    assert colours == [to_hex(PALETTE[0]), to_hex(PALETTE[3])], "a pipeline's inputs are rank 0's, its targets rank 3's"
    assert [5, 0] in triangles[0].get_xy().tolist() and [6, 1] in triangles[1].get_xy().tolist(), "inputs, targets"


def test_the_shares_that_rank_0_holds():
    assert overview.held() == {
        "data": (1.0, "25%"),
        "sharded data (ZeRO, FSDP)": (0.25, "25%"),
        "tensor": (0.25, "100%"),
        "pipeline": (0.25, "all inputs"),
        "context (sequence)": (1.0, "25%"),
        "expert": (0.625, "25%"),  # two layers of four whole, and a quarter of the experts' two
    }, "way: share of the model, part of the batch"


def test_shares_of_a_step_are_percent_in_groups():
    ax = overview.share_bars({"fast": [0.1, 0.02], "slow": [0.5, 0.25]}, ["few", "many"]).axes[0]
    assert [round(bar.get_width(), 6) for bar in ax.patches] == [10, 2, 50, 25], "percent, network by network"
    rows = [round(bar.get_y() + bar.get_height() / 2, 6) for bar in ax.patches]
    assert rows == [-0.2, 0.8, 0.2, 1.2], "a network's bar beside the other's, at its label"
    assert [text.get_text() for text in ax.texts] == ["10%", "2%", "50%", "25%"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["few", "many"] and "(%)" in ax.get_xlabel()


def test_a_cluster_counts_its_nodes_and_the_gpus_of_each():
    words = [text.get_text() for text in networks.cluster(450, 63, 50, nodes=2, gpus=2).axes[0].texts]
    names = [word.replace("\n", " ") for word in words if re.match("node|GPU|NIC|NVSw", word)]
    assert names == ["node 0", "GPU 0", "NIC", "GPU 1", "NIC", "NVSwitch", "node 1", "GPU 0", "NIC", "GPU 1", "NIC",
                     "NVSwitch"], "nodes and the GPUs of each are counted from 0"  # fmt: skip


def test_the_sliders_of_an_all_reduce_begin_at_a_cluster_of_1024_gpus():
    algorithms = {"ring": lambda n, cluster: 3e-3, "tree": lambda n, cluster: 1e-3, "hierarchical": lambda n, c: 2e-3}
    lab = networks.AllReduceLab(algorithms, lambda *numbers: numbers)
    assert {name: control.value for name, control in lab.controls.items()} == {
        "size": 64 * 2**20, "nodes": 128, "alpha_in": 3, "alpha_out": 6, "link_out": 50,
    }, "where the sliders begin"  # fmt: skip
    units = [control.description for control in lab.controls.values()]
    assert units == ["tensor", "nodes", "α in node, µs", "α between, µs", "GB/s per GPU"]
    labels = [label for label, _ in lab.controls["size"].options]
    assert labels[:6] == ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB"] and labels[-1] == "4 GiB"
    texts = [text.get_text() for text in lab.draw(2**30, 1, 3, 6, 50).axes[0].texts]
    assert texts == ["tree: 1 ms", "hierarchical: 2 ms", "ring: 3 ms", "1 GiB:"], "from the fastest, below, upwards"
