"""The calculator and the map of chapter 06 show what the planner says, and nothing else."""

import json
import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from common import ROOT
from course.fsdp import formulas
from planner import calculator, decision_map, hardware, models, pictures, search
from planner.estimate import GIB, estimate
from planner.layout import RECOMPUTE, Layout, make_layout


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


def test_what_is_asked_of_the_planner_unless_something_else_is_said():
    found = calculator.ask("llama-7b", 8, 3)
    assert found.cluster == hardware.cluster("h100-80gb", 8), "eight H100"
    layout = found.layout
    assert (layout.micro_batch, layout.batch_size, layout.sequence) == (1, 8, 4096), "one sequence of 4096 on each GPU"
    assert (layout.zero_stage, layout.size("shard")) == (3, 8) and not layout.offload


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


def test_every_control_redraws_and_errors_are_explained():
    sliders = calculator.Calculator()
    seen = {bytes(sliders.picture.value)}
    found = calculator.ask("llama-7b", 8, 3)
    for number in (f"{found.memory.high / GIB:.0f} GiB", f"{found.seconds:.2f} s", f"{100 * found.mfu:.0f}%"):
        assert number in sliders.text.value, "memory, time and MFU of what is shown"
    for name, value in [("model", "llama-13b"), ("gpus", 16), ("stage", 1), ("precision", "bf16"), ("sequence", 2048),
                        ("micro_batch", 4), ("recompute", "full"), ("offload", True)]:  # fmt: skip
        sliders.controls[name].value = value
        seen.add(bytes(sliders.picture.value))
    assert len(seen) == 9
    sliders.controls["model"].options = [*calculator.MODELS, "llama-8"]
    sliders.controls["model"].value = "llama-8"
    assert "llama-8" in sliders.text.value and sliders.picture.layout.display == "none"


def test_what_the_calculators_controls_offer(monkeypatch):
    controls = calculator.Calculator().controls
    offload = controls.pop("offload")
    found = {name: (control.description, control.options, control.value) for name, control in controls.items()}
    assert found == {
        "model": ("model", ("llama-3.2-1b", "llama-7b", "llama-13b", "llama-33b", "llama-2-70b", "llama-3-405b"),
                  "llama-7b"),
        "gpus": ("GPUs", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), 8),
        "stage": ("stage", {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3 (FSDP)": 3}, 3),
        "precision": ("precision", ("float32", "bf16-mixed", "fp16-mixed", "bf16"), "bf16-mixed"),
        "sequence": ("sequence", (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), 4096),
        "micro_batch": ("micro-batch", (1, 2, 4, 8, 16, 32), 1),
        "recompute": ("recompute", tuple(how for how in RECOMPUTE if how != "selective"), "none"),
    }, "what each control is called, what it offers, and where it begins"  # fmt: skip
    assert (offload.description, offload.value) == ("offload", False)
    monkeypatch.setattr(calculator, "draw", list)  # the labels alone
    shown = SimpleNamespace(text=SimpleNamespace())
    labels = [calculator.Calculator.draw(shown, "llama-3.2-1b", gpus, 0) for gpus in (1, 8)]
    assert labels == [["llama-3.2-1b\n1 GPU"], ["llama-3.2-1b\n8 GPUs"]], "what stands beside the bar"


def test_phases_of_a_step_are_marked():
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    lines = [dict(zip(kinds, (2**20, 0, 0, buffers, size * 2**20), strict=True))
             for buffers, size in ((2**18, 1), (2**18, 5), (2**18, 3), (2**18, 1), (0, 0), (0, 0), (0, 0))]  # fmt: skip
    fig = calculator.draw_steps({"one": (lines, 2), "two": (lines, 1)})
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert texts == ["forward", "backward", "step", "6.2 MiB"]
    assert fig.axes[0].get_ylim() == fig.axes[1].get_ylim()
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in fig.axes[0].collections]
    assert tops == [1, 1, 1, 1.25, 6.25], "MiB up to each kind, one upon the other"
    for ax, backward, title in zip(fig.axes, (2, 1), ("one", "two"), strict=True):
        assert [line.get_xdata()[0] for line in ax.lines] == [0, backward, 4], "where phases begin"
        assert [text.get_position()[0] for text in ax.texts[:3]] == [backward / 2, (backward + 4) / 2, 4.5]
        assert ax.texts[3].xy == (1, 6.25), "the peak, in MiB"
        assert (ax.get_xlim(), ax.get_ylim()) == ((0, 5), (0, 1.25 * 6.25)), "a quarter more than the backward pass"
        assert (ax.get_title(), ax.get_xlabel()) == (title, "operators of a step")
    assert fig.axes[0].get_ylabel() == "memory (MiB)"
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    assert legend == ["parameters", "gradients", "optimizer", "gathered units", "activations"]
    colours = [to_hex(area.get_facecolor()[0]).upper() for area in fig.axes[1].collections]
    assert colours == [calculator.COLOURS[name].upper() for name in legend], "the colours of the bars' legend"


def test_bars_of_time_lie_where_the_step_spends_it():
    """Communication is hidden under the end of the work, exposed after it, and the optimizer comes last."""
    found = calculator.ask("llama-7b", 64, 3)
    fig = calculator.draw({"one": found})
    left, right = fig.axes[:2]
    hidden, exposed = calculator.messages(found)
    optimizer = found.step.parts["optimizer"]
    work = found.seconds - exposed - optimizer
    expected = {"work": (0, work), "optimizer": (work + exposed, optimizer), "hidden": (work - hidden, hidden),
                "exposed": (work, exposed)}  # fmt: skip
    for (what, place), bar in zip(expected.items(), right.patches, strict=True):
        assert (bar.get_x(), bar.get_width()) == pytest.approx(place), f"begin and length of {what}"
    limit = found.cluster.gpu.memory / GIB
    assert list(left.lines[0].get_xdata()) == [limit, limit], "the line of what a GPU has"
    assert list(left.lines[0].get_ydata()) == [-0.5, 1], "which goes past all bars"
    (total,) = (text.get_text() for text in left.texts if text.get_weight() == "bold")
    assert total == f"{found.memory.needed / GIB:.0f}", "the sum beside the bar"
    assert [text.get_text() for text in right.texts] == [f" {found.seconds:.2f} s"]
    assert "GiB" in left.get_xlabel() and "seconds" in right.get_xlabel()
    assert [label.get_text() for label in left.get_yticklabels()] == ["one"]
    assert left.get_xlim() == pytest.approx((0, 1.15 * limit)) and right.get_xlim()[1] > found.seconds
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(calculator.GROUPS)
    names = [text.get_text() for text in right.get_legend().get_texts()]
    handles = right.get_legend().legend_handles
    for number, (name, handle) in enumerate(zip(names, handles, strict=True)):
        like = right.patches[number]
        assert (handle.get_facecolor(), handle.get_hatch()) == (like.get_facecolor(), like.get_hatch()), name
    for name, handle, bar in zip(calculator.GROUPS, left.get_legend().legend_handles, left.patches, strict=True):
        assert handle.get_facecolor() == bar.get_facecolor(), f"{name}: the colour of the legend and of the bar"
    plt.close(fig)


def test_numbers_stand_in_the_bars_that_are_wide_enough():
    found = calculator.ask("llama-13b", 8, 1, micro_batch=2)
    fig = calculator.draw({"one": found, "two": calculator.ask("llama-7b", 8, 3)})
    texts = {text.get_text(): text.get_position() for text in fig.axes[0].texts}
    ends, end = {}, 0.0
    for name, size in calculator.grouped(found).items():
        ends[name], end = (end, end + size), end + size
    for name in ("parameters", "gradients", "activations"):
        begin, end = ends[name]
        assert texts[f"{end - begin:.0f}"] == pytest.approx(((begin + end) / 2, 0)), f"{name}: GiB, in its bar"
    assert texts["79 GiB that a GPU has"] == (79.1, -0.55), "beside the line, above the bars"
    plt.close(fig)


def test_cells_of_a_map_are_where_their_model_and_gpus_are():
    kinds = {("a", 8): "tensor", ("a", 16): "pipeline", ("b", 8): "offload", ("b", 16): "does not fit"}
    rows = {key: {"kind": kind, "layout": kind[:2], "next": "ZeRO-3 (FSDP)"} for key, kind in kinds.items()}
    fig = decision_map.draw_rows(rows, "title", "GPUs")
    found = {patch.get_xy(): to_hex(patch.get_facecolor()).upper() for patch in fig.axes[0].patches}
    places = {("a", 8): (0, 0), ("a", 16): (1, 0), ("b", 8): (0, 1), ("b", 16): (1, 1)}
    assert found == {places[key]: decision_map.LAYOUT_KINDS[kind].upper() for key, kind in kinds.items()}
    inks = {text.get_text(): text.get_color() for text in fig.axes[0].texts}
    assert inks == {"te": "white", "pi": "black", "of": "black", "do": "black"}, "white on dark colours"
    legend = fig.legends[0]
    shown = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    for kind, colour in decision_map.LAYOUT_KINDS.items():
        assert to_hex(shown[kind].get_facecolor()).upper() == colour.upper(), f"the legend's colour of {kind}"
    plt.close(fig)


def test_the_map_is_whole_and_what_the_planner_says():
    rows, network = decision_map.stored(), next(iter(decision_map.NETWORKS))
    assert rows.keys() == {(name, model, gpus) for name in decision_map.NETWORKS for model in decision_map.MODELS
                           for gpus in decision_map.GPUS}  # fmt: skip
    assert {row["kind"] for row in rows.values()} <= decision_map.LAYOUT_KINDS.keys()
    for model, gpus in (("llama-3.2-1b", 8),):
        found, said = decision_map.cell(model, gpus, network), rows[network, model, gpus]
        assert found == {name: value for name, value in said.items() if value}


def test_of_each_kind_the_fastest_four_are_estimated_exactly(monkeypatch):
    """A search says 1 to 6 s for six layouts; exactly, the fourth takes 0.5 s and nobody asks about the fifth."""
    exact = {0: 3.0, 1: 2.5, 2: 2.0, 3: 0.5, 4: 0.1, 5: 0.55}
    layouts = [Layout((("shard", 8),), 64, zero_stage=3, micro_batch=number + 1) for number in range(5)]
    layouts.append(Layout((("tensor", 8),), 64, micro_batch=6, recompute="full"))
    offloads, gpu = [], SimpleNamespace(memory=80 * GIB)

    def candidates(*given):
        offloads.append(given[-1])
        return [search.Candidate(layout, 1.0 + number, (60 if number else 5) * GIB, (60 if number else 5) * GIB)
                for number, layout in enumerate(layouts)][::-1]  # fmt: skip

    def estimated(shape, cluster, layout, constants):
        memory = SimpleNamespace(expected=12.34 * GIB, needed=15 * GIB)
        return SimpleNamespace(layout=layout, seconds=exact[layouts.index(layout)], mfu=0.4567, memory=memory)

    monkeypatch.setattr(decision_map.search, "candidates", candidates)
    monkeypatch.setattr(decision_map, "estimate", estimated)
    row = decision_map.searched("a shape", SimpleNamespace(gpu=gpu), 64, 4096, "bf16-mixed", "constants")
    assert row == {
        "kind": "ZeRO-3 (FSDP)", "layout": "Z3", "micro_batch": "4", "recompute": "none", "seconds": "0.5",
        "mfu": "0.457", "gib": "12.3", "next": "tensor", "later": "0.100",
    }, "the winner of the exact estimates, and how much longer the next kind takes"  # fmt: skip
    assert offloads == [False], "offload is not looked at where something fits"
    gpu.memory = 4 * GIB
    row = decision_map.searched("a shape", SimpleNamespace(gpu=gpu), 64, 4096, "bf16-mixed", "constants")
    assert (row, offloads) == ({"kind": "does not fit"}, [False, False, True]), "then with offload, and nothing fits"


def test_the_map_is_written_cell_by_cell(monkeypatch, tmp_path):
    def cell(model, gpus, network):
        row = {"network": network, "model": model, "gpus": str(gpus), "kind": "tensor"}
        return row | ({"next": "offload"} if gpus == 16 else {})

    for name, value in {"cell": cell, "STORED": tmp_path / "map.csv", "NETWORKS": {"N": 0}, "MODELS": ("a", "b"),
                        "GPUS": (8, 16)}.items():  # fmt: skip
        monkeypatch.setattr(decision_map, name, value)
    decision_map.main()
    table = b"network,model,gpus,kind,next\nN,a,8,tensor,\nN,a,16,tensor,offload\n"
    table += b"N,b,8,tensor,\nN,b,16,tensor,offload\n"
    assert (tmp_path / "map.csv").read_bytes() == table, "a head, then the cells of a model one after the other"


@pytest.mark.parametrize(
    "axes, fields, kind, short",
    [
        ({"data": 8}, {}, "DDP, ZeRO-1, ZeRO-2", "DDP"),
        ({"shard": 8}, {"zero_stage": 2}, "DDP, ZeRO-1, ZeRO-2", "Z2"),
        ({"shard": 8}, {"zero_stage": 3}, "ZeRO-3 (FSDP)", "Z3"),
        ({"data": 4, "shard": 2}, {"zero_stage": 3}, "ZeRO-3 (FSDP)", "H4 Z3"),
        ({"shard": 4, "tensor": 2}, {"zero_stage": 3}, "tensor", "T2 Z3"),
        ({"shard": 4, "context": 2}, {"zero_stage": 1}, "tensor", "C2 Z1"),
        ({"pipeline": 8}, {}, "pipeline", "P8"),
        ({"pipeline": 4, "data": 2, "tensor": 2}, {}, "pipeline and tensor", "P4 T2 DDP"),
        ({"shard": 8}, {"zero_stage": 3, "offload": True}, "offload", "Z3"),
    ],
)
def test_layouts_have_kinds_and_short_names(axes, fields, kind, short):
    layout = Layout(tuple(axes.items()), 64, **fields)
    assert (decision_map.kind_of(layout), decision_map.short(layout)) == (kind, short)


def test_the_map_marks_what_is_within_five_percent():
    for network in decision_map.NETWORKS:
        rows = decision_map.stored()
        texts = [text.get_text() for text in decision_map.draw(network).axes[0].texts]
        cells = [rows[network, model, gpus] for model in decision_map.MODELS for gpus in decision_map.GPUS]
        for row, text in zip(cells, texts, strict=True):
            assert text.partition("\n")[0] == row["layout"]
            assert ("≈" in text) == (row["later"] != "" and float(row["later"]) <= 0.05), f"{row}: {text}"
        plt.close("all")


def notebook_text(name: str) -> str:
    cells = json.loads((ROOT / "06_fsdp" / name).read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def test_what_the_page_says_of_the_map_is_what_the_map_says():
    rows, (fast,) = decision_map.stored(), decision_map.NETWORKS
    text = " ".join(notebook_text("04_choosing.ipynb").split())
    for network, model, gpus, sentence in (
        (fast, "llama-7b", (8, 64, 1024), "7B falls from {}% on one node to {}% on 64 GPUs, and to {}% with 1,024"),
    ):
        found = [round(100 * float(rows[network, model, number]["mfu"])) for number in gpus]
        assert sentence.format(*found) in text, f"the page does not say of {model}: {sentence.format(*found)}"


def test_the_calculators_alt_text_is_of_what_it_first_shows():
    said = re.search(r'Calculator\(\)\.show\(alt="Memory of a (\w+) model with (\S+) on (\d+) GPUs',
                     notebook_text("03_fitting_in.ipynb"))  # fmt: skip
    shown = {name: control.value for name, control in calculator.Calculator().controls.items()}
    stage = next(name for name, number in calculator.STAGES.items() if number == shown["stage"])
    assert shown["model"] == f"llama-{said[1].lower()}" and stage.startswith(said[2]) and shown["gpus"] == int(said[3])


def test_bytes_of_a_parameter_by_precision():
    """Parameter, gradient and optimizer, as the comment's sources add them up: 16, 16, 18, 20, 8 and 12 bytes."""
    assert formulas.BYTES == {
        "float32": (4, 4, 8), "mixed": (2, 2, 12), "mixed, float32 gradients": (2, 4, 12),
        "mixed, two gradients": (2, 6, 12), "bf16": (2, 2, 4), "bf16, float32 moments": (2, 2, 8),
    }, "bytes of a parameter, its gradient and its optimizer state"  # fmt: skip
    cut = {"ddp": "", "zero1": "optimizer", "zero2": "optimizer gradients", "fsdp": "parameters gradients optimizer"}
    assert {name: " ".join(kinds) for name, kinds in formulas.SHARDED.items()} == cut, "what each stage cuts"


def test_bytes_of_a_layer_and_of_scores_worked_out_by_hand():
    """Of width 10, queries 8, keys 4, an MLP of 20, on two ranks."""
    sizes = {"width": 10, "query": 8, "key": 4, "mlp_width": 20, "tensor": 2}
    for fields, expected in (
        ({"recompute": "full"}, 2 * 10 / 2),
        ({"recompute": "full", "sequence_parallel": False}, 2 * 10),
        ({"recompute": "products"}, 2 * (30 / 2 + (8 + 4 + 4 + 20) / 2)),
        ({"recompute": "products", "gated": 4}, 2 * (30 / 2 + (8 + 4 + 4 + 40) / 2)),
        ({"recompute": "operators"}, 2 * (10 / 2 + (8 + 8 + 4 + 20) / 2)),
        ({"recompute": "operators", "gated": 4}, 2 * (20 / 2 + (8 + 8 + 4 + 20) / 2)),
        ({}, 2 * (40 / 2 + (16 + 8 + 40) / 2)),
        ({"gated": 3}, 2 * (40 / 2 + (16 + 8 + 60) / 2)),
        ({"dropout": True}, 2 * (40 / 2 + (16 + 8 + 40) / 2) + 20 / 2),
        ({"itemsize": 4}, 4 * (40 / 2 + (16 + 8 + 40) / 2)),
    ):
        assert formulas.layer_bytes(**sizes, **fields) == expected, f"bytes per token that a layer keeps, {fields}"
    assert formulas.score_bytes(4, 10, tensor=2) == 5 * 4 * 10 / 2, "5as/t with dropout"
    assert formulas.score_bytes(4, 10, dropout=False) == 2 * 4 * 10, "one matrix of 16 bits without dropout"


def test_links_of_all_panels_have_one_scale():
    fig = pictures.draw_links({"all": {(0, 1, 2, 3): 1000}, "rows": {(0, 1): 500, (2, 3): 500}})
    widths = [{line.get_linewidth() for line in ax.lines} for ax in fig.axes]
    assert widths == [{12}, {7}]
