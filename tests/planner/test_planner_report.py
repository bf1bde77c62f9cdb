"""What `--explain` and `scoreboard` print, whole, and pictures and notes of a plan, of numbers that are given.
Estimates and plans in lines are in tests/planner/test_planner_text.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from planner import hardware, memory, models, output, plot, scoreboard, search
from planner.constants import PRIOR
from planner.estimate import GIB, Estimate
from planner.layout import Layout
from planner.time import StepTime

PARTS = {"work": 8.0, "messages in layers": 0.5, "bubble": 1.0, "messages of state": 0.25, "optimizer": 0.25}
STEP = StepTime(PARTS, 10.0, 0.1, 0.75, {"shard": 3e9})
KEPT = {"parameters": 5 * GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": 7 * GIB}
AT_LOSS = {"activations": 4 * GIB, "gathered": GIB, "unsharded gradients": 2 * GIB, "logits and loss": 3 * GIB,
           "messages": GIB / 4, "a layer computed again": GIB / 2}  # fmt: skip


def made(parts=KEPT, phase: str = "backward", **fields) -> Estimate:
    """Of 16 GPUs of 80 GiB: 10 seconds a step, and as much memory as is told below."""
    cluster = hardware.cluster("h100-80gb", 16, 8)
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory=80 * GIB))
    layout = Layout((("shard", 16),), **{"batch_size": 32, "sequence": 1000, "zero_stage": 3} | fields)
    found = memory.Memory(parts, phase, 0, sum(parts.values()), 10 * GIB, 20 * GIB, 40 * GIB)
    constants = replace(PRIOR, step_low=0.5, step_high=2.0)
    return Estimate(models.find("llama-7b"), cluster, layout, found, STEP, constants)


def test_notes_of_a_plan_are_those_of_its_best_layout():
    two = [search.Choice(made(), "the other"), search.Choice(made(micro_batch=2, zero_stage=2), "this one")]
    assert output.table(two).splitlines()[-1] == "1 sends 3.00 GB per GPU and step along shard", "nothing to note"
    turned = output.table(two[::-1]).splitlines()
    assert turned[-1] == "note: not checked against any published run: ZeRO stages 1 and 2"


EXPLAINED = [
    "parameters      6,738,415,616  (llama-7b: Touvron et al. 2023, table 2)",
    "readers         data x shard x expert = 1 x 16 x 1 = 16",
    "micro-batches   32 / (16 x 1) = 2",
    "memory          largest on rank 0 of the pipeline, with 32 layers and the embedding and the head, "
    "in the phase 'backward':",
    "       5.00 GiB  parameters: recipe 'float32', stage 3 over 16 ranks: chapter 06's formula "
    "(Rajbhandari et al. 2020, section 5)",
    "       1.00 GiB  gradients: the same formula",
    "       2.00 GiB  optimizer: the same formula",
    "       7.00 GiB  activations: 1 micro-batches held (chapter 05's simulator) x 32 layers x 0.123 "
    "GiB, recomputation 'none' (Korthikanti et al. 2022, table 2, by parts)",
    "      15.00 GiB  needed; x 1.05 (1.00 to 1.15) for the allocator = 20.00 GiB (prior)",
    "step            10.000 s, on the rank that has most to do:",
    "      8.000 s    work: products at 989 TFLOP/s x 0.80 (best measured) x 0.90 (fitted) = 715 "
    "TFLOP/s, and bytes over 3.35 TB/s x 0.85",
    "      0.500 s    messages in layers: of tensor, context and expert parallelism, over the links that "
    "their groups cross (chapter 01: steps x alpha + bytes / bandwidth)",
    "      1.000 s    bubble: 1f1b, 1 ranks, 2 micro-batches (chapter 05's simulator)",
    "      0.250 s    messages of state: gradients and parameters that no work hides",
    "      0.250 s    optimizer: bytes of AdamW's state through the memory, here the host's, and "
    "gradients and parameters over PCIe",
    "MFU             41.2 GFLOP per token (6 per parameter of a product, 12 layers x width x sequence "
    "for attention: Chowdhery et al. 2022, appendix B) x 3,200 tokens/s / 16 GPUs / 989 TFLOP/s = 0.8%",
    "GPU             h100-80gb: NVIDIA H100 data sheet; attention of FlashAttention-2 on it (Shah et al. "
    "2024, figure 5)",
    "network         infiniband-400: 8 x 50 GB/s per node",
]  # fmt: skip


def test_every_number_as_a_formula():
    assert output.explain(made(offload=True)).splitlines() == EXPLAINED, "what --explain prints"


STAGES = [
    "parameters      50,009,000  (toy: given)",
    "readers         data x shard x expert = 1 x 2 x 1 = 2",
    "micro-batches   32 / (2 x 2) = 8",
    "memory          largest on rank 1 of the pipeline, with 2 layers and the head, in the phase 'loss':",
    "       4.00 GiB  activations: 3 micro-batches held (chapter 05's simulator) x 1 layers x 0.001 "
    "GiB, recomputation 'full' (Korthikanti et al. 2022, table 2, by parts)",
    "       1.00 GiB  gathered: 16-bit parameters that stage 3 has whole: two units, or a pipeline's "
    "whole stage",
    "       2.00 GiB  unsharded gradients: of one unit, or of a pipeline's stage until its last "
    "micro-batch",
    "       3.00 GiB  logits and loss: 2,000 tokens x 1,000 / 4 x 4 bytes, several times "
    "(planner/constants.py, loss_copies)",
    "       0.25 GiB  messages",
    "       0.50 GiB  a layer computed again: 0.01 GiB without recomputation, less what was kept",
    "      10.75 GiB  needed; x 1.05 (1.00 to 1.15) for the allocator = 20.00 GiB (prior)",
    "step            10.000 s, on the rank that has most to do:",
    "      8.000 s    work: products at 989 TFLOP/s x 0.80 (best measured) x 0.90 (fitted) = 715 "
    "TFLOP/s, and bytes over 3.35 TB/s x 0.85",
    "      0.500 s    messages in layers: of tensor, context and expert parallelism, over the links that "
    "their groups cross (chapter 01: steps x alpha + bytes / bandwidth)",
    "      1.000 s    bubble: interleaved, 2 ranks, 8 micro-batches (chapter 05's simulator)",
    "      0.250 s    messages of state: gradients and parameters that no work hides",
    "      0.250 s    optimizer: bytes of AdamW's state through the memory",
    "MFU             0.3 GFLOP per token (6 per parameter of a product, 12 layers x width x sequence for "
    "attention: Chowdhery et al. 2022, appendix B) x 3,200 tokens/s / 16 GPUs / 989 TFLOP/s = 0.0%",
    "GPU             h100-80gb: NVIDIA H100 data sheet; attention of FlashAttention-2 on it (Shah et al. "
    "2024, figure 5)",
    "network         infiniband-400: 8 x 50 GB/s per node",
]  # fmt: skip


def test_every_number_of_a_pipelines_last_stage():
    """Of two ranks with two stages each, and a layer in each stage."""
    toy = models.Model("toy", 4, 1000, 10, 1000)
    stages = Layout((("pipeline", 2), ("shard", 2), ("tensor", 4)), 32, 2, 1000, 3, "interleaved", 2, "full")
    found = replace(made(AT_LOSS, "loss"), model=toy, layout=stages)
    found = replace(found, memory=replace(found.memory, rank=1))
    assert output.explain(found).splitlines() == STAGES, "what --explain prints"


def test_the_picture_of_a_plan(monkeypatch):
    """Above GiB of each part, below seconds; bars of a layout begin where those before end, the best on top."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, path, **_: drawn.append((fig, path)))
    slow = replace(made({"parameters": 90 * GIB, "messages": 2 * GIB}), step=replace(STEP, parts={"work": 20.0}))
    plot.picture([made()], "small.png")
    assert drawn.pop()[0].axes[0].get_xlim()[1] == pytest.approx(1.1 * 80), "what a GPU has is in the picture"
    plot.picture([made(), slow], "plan.png")
    ((fig, path),) = drawn
    assert path == "plan.png" and fig.get_suptitle() == "llama-7b on 16 x h100-80gb"
    told = [
        ("memory per GPU (GiB)", {
            "parameters": [(0, 5), (0, 90)], "gradients": [(5, 1), (90, 0)], "optimizer": [(6, 2), (90, 0)],
            "activations": [(8, 7), (90, 0)], "messages": [(15, 0), (90, 2)]}, [" 15", " 92", " 80 GiB"], 1.1 * 92),
        ("step (seconds)", {
            "work": [(0, 8), (0, 20)], "messages in layers": [(8, 0.5), (20, 0)], "bubble": [(8.5, 1), (20, 0)],
            "messages of state": [(9.5, 0.25), (20, 0)], "optimizer": [(9.75, 0.25), (20, 0)]},
         [" 10.00", " 20.00"], 22),
    ]  # fmt: skip
    for ax, (title, bars, texts, right) in zip(fig.axes, told, strict=True):
        assert ax.get_xlabel() == title and ax.get_xlim() == pytest.approx((0, right)), title
        names = [text.get_text() for text in ax.get_legend().get_texts()]
        found = {name: [(bar.get_x(), bar.get_width()) for bar in row]
                 for name, row in zip(names, ax.containers, strict=True)}  # fmt: skip
        assert found == bars, f"(begin, length) of the bars of each layout, {title}"
        colours = {tuple(row.patches[0].get_facecolor()) + (row.patches[0].get_hatch(),) for row in ax.containers}
        assert len(colours) == len(bars), "each part has a colour of its own"
        assert [text.get_text() for text in ax.texts] == texts, f"numbers beside the bars, {title}"
        labels = [label.get_text() for label in ax.get_yticklabels()]
        assert labels == [f"{n}. {made().layout.describe()}" for n in (1, 2)] and ax.yaxis_inverted(), "layouts"
    (limit,) = fig.axes[0].lines
    assert list(limit.get_xdata()) == [80, 80], "what a GPU has"


# --- the scoreboard ---------------------------------------------------------------------------------------------------

NONE = {"runs": 0}
SCORES = {
    "sources": {
        "a source": {"time": {"runs": 3, "mean": 0.1, "p90": 0.2, "bias": -0.05}, "memory": NONE},
        "b": {"time": {"runs": 12, "mean": 0.123, "p90": 0.25, "bias": 0.05},
              "memory": {"runs": 2, "mean": 0.01, "p90": 0.02, "bias": 0.03}},
    },
    "time": {"runs": 15, "mean": 0.11, "p90": 0.22, "bias": 0.01},
    "memory": {"runs": 4, "mean": 0.04, "p90": 0.05, "bias": -0.06},
    "ranking": {"b": {"pairs": 7, "tau": 0.87}}, "tau": 0.93,
    "out_of_memory": {"runs": 17, "said": 3, "true": 4, "precision": 0.75, "recall": 0.5},
}  # fmt: skip


def line(name: str, seconds: float | None, gib: float | None, fits: bool = True) -> SimpleNamespace:
    """Of a run of "b" that was predicted to take 12 seconds and 20 GiB."""
    run = SimpleNamespace(source="b", name=name, seconds=seconds, gib=gib)
    errors = {"time_error": seconds and 12.0 / seconds - 1, "memory_error": gib and 20.0 / gib - 1}
    return SimpleNamespace(run=run, seconds=12.0, gib=20.0, fits=fits, **errors)


BOARD = [
    "Each source predicted with constants fitted on the other sources.",
    "",
    "                                        step time                       memory         order",
    "source                 runs   mean   90th   bias   runs   mean   90th   bias   pairs   tau",
    "a source                  3  10.0%  20.0%  -5.0%      -      -      -      -       -     -",
    "b                        12  12.3%  25.0%  +5.0%      2   1.0%   2.0%  +3.0%       7  0.87",
    "all                      15  11.0%  22.0%  +1.0%      4   4.0%   5.0%  -6.0%          0.93",
    "",
    "out of memory: of 17 runs 4 were, 3 are said to be: precision 75%, recall 50%",
    "b                    one                                                                            "
    "              12.00 s,     10.00 measured, +20.0%      20.0 GiB,   25.0 measured, -20.0%",
    "b                    two                                                                            "
    "          out of memory; predicted to not fit   ",
    "b                    three                                                                          "
    "          out of memory; predicted to fit   ",
]  # fmt: skip


def test_the_scoreboard():
    """With every run: its times and GiB, or whether it was said to fit."""
    runs = [line("one", 10.0, 25.0), line("two", None, None, fits=False), line("three", None, None)]
    assert scoreboard.text(SCORES, runs).splitlines() == BOARD, "with --runs"
    assert scoreboard.text(SCORES).splitlines() == BOARD[:-3], "without the runs"


def test_scores_are_those_of_each_source_and_of_all():
    """Two sources, whose pairs of layouts count alike; what was not measured is left out."""

    def one(source, predicted, measured, error=None, batch=1, **more):
        nodes = SimpleNamespace(gpus=8, gpu=SimpleNamespace(name="g"))
        layout = SimpleNamespace(sequence=4, batch_size=batch)
        run = SimpleNamespace(source=source, seconds=measured, model=SimpleNamespace(name="m"), cluster=nodes,
                              layout=layout, out_of_memory=measured is None)  # fmt: skip
        time_error = predicted / measured - 1 if measured else None
        return SimpleNamespace(run=run, seconds=predicted, time_error=time_error, memory_error=error, fits=True)

    lines = [one("a", 11.0, 10.0, 0.5), one("a", 18.0, 20.0), one("a", 36.0, 30.0, -0.1), one("b", 1.0, 2.0),
             one("b", 2.0, 1.0), one("b", 9.0, None)]  # fmt: skip
    found = scoreboard.scores(lines)
    for source, expected in (("a", [3, 0.4 / 3, 0.2, 0.2 / 3]), ("b", [2, 0.75, 1.0, 0.25])):
        time = found["sources"][source]["time"]
        shown = [time[name] for name in ("runs", "mean", "p90", "bias")]
        assert shown == pytest.approx(expected), f"runs, mean, 90th percentile and bias of the times of {source}"
    assert (found["sources"]["a"]["memory"]["runs"], found["sources"]["b"]["memory"]["runs"]) == (2, 0)
    assert (found["time"]["runs"], found["memory"]["runs"]) == (5, 2), "runs whose time and memory were measured"
    assert found["time"]["mean"] == pytest.approx(1.9 / 5) and found["memory"]["bias"] == pytest.approx(0.2)
    assert found["ranking"] == {"a": {"pairs": 3, "tau": 1.0}, "b": {"pairs": 1, "tau": -1.0}}
    assert found["tau"] == (3 - 1) / 4, "over all pairs"
    assert found["out_of_memory"]["true"] == 1
