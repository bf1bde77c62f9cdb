"""What the planner's constants are fitted to, what the scoreboard counts, and the tables of hardware and models."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common import gpus as table
from planner import constants, fit, hardware, layer_time, models, published, scoreboard
from planner.constants import PRIOR
from planner.hardware import cluster, find_gpu

GIB = 2**30


def run(source: str, seconds: float | None = None, gib: float | None = None, **more) -> SimpleNamespace:
    return SimpleNamespace(source=source, seconds=seconds, gib=gib, out_of_memory=seconds is None, model=None,
                           layout=None, **more)  # fmt: skip


def test_every_source_counts_alike_in_a_fit(monkeypatch):
    """Errors of a factor e, 1 and e**2: the mean of (1 + 0) / 2 and 4; and a pull towards the prior."""
    monkeypatch.setattr(fit, "seconds", lambda one, constants: one.predicted)
    runs = [run("a", 1.0, predicted=math.e), run("a", 1.0, predicted=1.0), run("b", 1.0, predicted=math.e**2)]
    runs.append(run("b", None, predicted=5.0))
    assert fit.loss(runs, PRIOR) == pytest.approx((0.5 + 4) / 2), "the mean of both sources' mean squared logarithms"
    far = replace(PRIOR, matmul=PRIOR.matmul * math.e)
    assert fit.loss(runs, far) - fit.loss(runs, PRIOR) == pytest.approx(fit.PULL / len(constants.FITTED)), (
        "the pull to the prior"
    )


def test_a_constant_stays_within_its_bounds(monkeypatch):
    monkeypatch.setattr(fit, "seconds", lambda one, constants: one.at / constants.matmul)
    assert fit.fit([run("a", 100.0, at=1.0)], sweeps=1).matmul == fit.BOUNDS["matmul"][0], "the lower bound"
    assert fit.fit([run("a", 1.0, at=100.0)], sweeps=1).matmul == fit.BOUNDS["matmul"][1], "the upper bound"


def test_what_the_allocator_adds_is_the_middle_of_each_source(monkeypatch):
    monkeypatch.setattr(fit.memory, "estimate", lambda *_: SimpleNamespace(needed=10 * GIB))
    runs = [run("a", gib=9.0), run("a", gib=10.0), run("a", gib=30.0), run("b", gib=14.4), run("c", 1.0)]
    found = fit.fit_memory(runs, PRIOR)
    assert found.allocator == pytest.approx(1.2), "between 10 / 10 and 14.4 / 10"
    assert (found.allocator_low, found.allocator_high) == pytest.approx((1.1, 1.3)), "a tenth less and more"
    assert fit.fit_memory([run("c", 1.0)], PRIOR) == PRIOR, "no run whose memory is known"


def test_a_prediction_is_compared_with_what_was_measured(monkeypatch):
    monkeypatch.setattr(fit, "seconds", lambda one, constants: 12.0)
    monkeypatch.setattr(scoreboard.memory, "estimate", lambda *_: SimpleNamespace(expected=20 * GIB, low=10 * GIB))
    small, large = (SimpleNamespace(gpu=SimpleNamespace(memory=gib * GIB)) for gib in (15, 25))
    line = scoreboard.predict(run("a", 10.0, 25.0, cluster=small), PRIOR)
    assert (line.time_error, line.memory_error) == pytest.approx((0.2, -0.2)), "of what was measured"
    assert not line.fits and scoreboard.predict(run("a", cluster=large), PRIOR).fits, "what is expected is what fits"


def test_each_source_has_constants_of_its_own(monkeypatch):
    monkeypatch.setattr(scoreboard, "runs", lambda: [run("a"), run("b")])
    monkeypatch.setattr(scoreboard, "predict", lambda one, constants: (one.source, constants))
    assert scoreboard.leave_one_out({"a": 1, "b": 2}) == [("a", 1), ("b", 2)], (
        "each run, by the constants of its source"
    )


def test_intervals_are_as_wide_as_the_errors_on_sources_left_out(monkeypatch):
    monkeypatch.setattr(scoreboard, "refit_all", lambda: {"a": PRIOR})
    monkeypatch.setattr(scoreboard, "leave_one_out", lambda left_out: [])
    monkeypatch.setattr(scoreboard, "scores", lambda lines: {"time": {"p90": 0.25}, "memory": {"p90": 0.6}})
    monkeypatch.setattr(scoreboard.fit, "fit", lambda runs: replace(PRIOR, allocator=2.0))
    fitted, left_out = scoreboard.refit()
    found = fitted.step_low, fitted.step_high, fitted.allocator_low, fitted.allocator_high
    assert found == pytest.approx((0.8, 1.25, 1.25, 3.2)) and left_out == {"a": PRIOR}, (
        "step and allocator, low and high"
    )


def line(fits: bool, ran: bool) -> SimpleNamespace:
    return SimpleNamespace(fits=fits, run=run("a", 1.0 if ran else None))


def test_precision_and_recall_of_what_does_not_fit():
    lines = [line(False, False)] * 2 + [line(False, True)] + [line(True, False)] * 2 + [line(True, True)] * 5
    assert scoreboard.out_of_memory(lines) == {"runs": 10, "said": 3, "true": 4, "precision": 2 / 3, "recall": 2 / 4}


def test_layouts_are_ordered_by_their_time_per_token():
    """A step of twice the tokens may take longer and still be the faster one."""
    model, nodes = SimpleNamespace(name="m"), SimpleNamespace(gpus=8, gpu=SimpleNamespace(name="g"))
    lines = []
    for predicted, measured, batch in ((10.0, 10.0, 1), (15.0, 12.0, 2)):
        one = run("a", measured)
        one.model, one.cluster, one.layout = model, nodes, SimpleNamespace(sequence=4, batch_size=batch)
        lines.append(SimpleNamespace(run=one, seconds=predicted))
    assert scoreboard.rankings(lines) == {"a": (1, 1.0)}, "(pairs, Kendall's tau) of the source"


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_networks_rate_is_that_of_its_name():
    for name, (rate, source) in hardware.NETWORKS.items():
        bits = int(name.rpartition("-")[2])
        assert rate == bits / 8 * 1e9 and f"{bits} Gb/s" in source, f"bytes per second of {name}"


def test_gpus_are_those_of_a_published_table():
    """Bekman's table: peaks in 16 bit, which share of them the best of many products reached, the memory's rate."""
    known = {"A100 SXM": "a100-80gb", "H100 SXM": "h100-80gb", "H200 SXM": "h200", "B200 SXM": "b200",
             "GB200 SXM": "gb200-nvl72"}  # fmt: skip
    found = {row["accelerator"]: row for row in published.rows("hardware_mamf_bf16.csv")}
    for theirs, ours in known.items():
        gpu, row = find_gpu(ours), found[theirs]
        assert gpu.peak == float(row["spec_bf16_tflops"]) * 1e12, ours
        assert gpu.achievable == float(row["efficiency"]), ours
        assert gpu.hbm == pytest.approx(float(row["hbm_TBps"]) * 1e12, rel=0.03), ours


def test_every_gpu_can_be_one():
    for gpu in hardware.GPUS.values():
        assert 0 < gpu.attention <= gpu.achievable <= 1, f"shares of the peak of {gpu.name}"
        assert gpu.peak_fp8 == 0 or gpu.peak_fp8 == pytest.approx(2 * gpu.peak, rel=0.02), f"8 bit on {gpu.name}"
        assert gpu.link >= gpu.pcie or gpu.name in ("cpu", "rtx-4090"), f"links of {gpu.name}"
        said = re.search(r"-(\d+)gb$", gpu.name)
        assert said is None or 0.88 < gpu.memory / (int(said[1]) * 1e9) <= 1.074, f"a driver keeps some of {gpu.name}"
        assert gpu.source and cluster(gpu.name, 2 * gpu.gpus_per_node).node_network > 0, gpu.name
    for row in table.rows():
        assert row["device"] == "" or table.named_by_pytorch(f"NVIDIA {row['device']}") == row, row["name"]


def test_other_names_of_gpus():
    for alias, name in (("a100", "a100-80gb"), ("h100", "h100-80gb"), ("b200-180gb", "b200"), ("4090", "rtx-4090")):
        assert find_gpu(alias.upper()).name == name, alias
    one = cluster("h100", 8)
    assert (one.host, one.host_memory) == (300e9, 1000 * GIB), "bytes per second and bytes of a node's own memory"


def test_constants_before_they_are_fitted():
    told = {
        "matmul": 0.9, "passes": 2.0, "eager": 1.5, "attention": 1.0, "fp8": 1.4, "link": 0.8, "network": 0.7,
        "kept": 0.89, "async_kept": 0.5, "ring": 0.5, "memory_rate": 0.85, "kernel": 4e-6, "alpha_link": 2.9e-6,
        "alpha_network": 8e-6, "allocator_low": 1.0, "allocator": 1.05, "allocator_high": 1.15, "loss_copies": 3.5,
        "parallel_loss_copies": 5.0, "step_low": 0.85, "step_high": 1.2, "source": "prior",
    }  # fmt: skip
    differ = {name: value for name, value in vars(PRIOR).items() if told.get(name) != value}
    assert not differ and vars(PRIOR).keys() == told.keys(), f"constants of the prior: {differ}"
    fixed = {name: value for name, value in told.items() if name not in constants.FITTED and value != "prior"}
    stored = vars(constants.load())
    for name in ("link", "kept", "memory_rate", "kernel", "alpha_link", "alpha_network", "loss_copies"):
        assert stored[name] == fixed[name], f"{name} is not fitted"


def test_adapters_and_networks_that_are_usual():
    """One adapter for each GPU in data centres, also where a node has fewer of them."""
    for gpu, gpus, per_node, rate, number in (
        ("a100-40gb", 16, 8, 25e9, 8), ("h100-80gb", 16, 8, 50e9, 8), ("h100-80gb", 8, 4, 50e9, 4),
        ("v100-32gb", 16, 8, 12.5e9, 4), ("l4", 16, 8, 12.5e9, 1), ("gb200-nvl72", 144, 72, 50e9, 72),
    ):  # fmt: skip
        found = cluster(gpu, gpus, per_node)
        assert (found.network, found.adapters) == (rate, number), f"{gpu}, {per_node} in a node"
        assert found.node_network == rate * number and found.nodes == gpus // per_node, (
            f"nodes of {gpu}, and bytes per second of one"
        )
    assert cluster("h100-80gb", 2).gpus_per_node == 2, "GPUs of a node that is not full"
    assert cluster("l4", 16, 8).name == "ethernet-100", "the name of the usual network"
    assert cluster("l4", 16, 8, "efa-400").name == "efa-400", "the name of a network that was asked for"


def test_a_model_has_about_as_many_parameters_as_its_name_says():
    units, checked = {"m": 1e6, "b": 1e9, "t": 1e12}, 0
    for name, model in models.MODELS.items():
        if (said := re.search(r"-([\d.]+)([mbt])$", name)) and "llama-3.2" not in name:
            checked += 1
            assert model.parameters == pytest.approx(float(said[1]) * units[said[2]], rel=0.12), name
    assert checked > 40
    exact = {"gpt2-medium": 355, "gpt2-large": 774, "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "bert-base": 109}
    for name, millions in exact.items():
        assert models.find(name).parameters / 1e6 == pytest.approx(millions, rel=3e-3), name
    active = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.2, "deepseek-v3": 37.6}
    for name, billions in active.items():
        assert models.find(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.01), f"active of {name}"


def test_other_names_mean_the_model_that_they_say():
    for alias, name in models.ALIASES.items():
        size = re.search(r"\d+b|medium|large|xl", alias.replace("30b", "33b"))
        assert size is None or size[0] in re.findall(r"\d+b|medium|large|xl", name), alias
    assert models.find("llama-70b").name == "llama-2-70b" and models.find("Llama-3.1-8B").name == "llama-3-8b"


# --- times of a layer -------------------------------------------------------------------------------------------------


def test_rates_of_precisions():
    """TF32 has half of 16-bit's peak, and a processor's is that of float32; 8 bit is faster only where there is any."""
    one = replace(PRIOR, matmul=1.0, fp8=1.5)
    for gpu, precision, factor in (
        ("h100-80gb", "bf16-mixed", 1), ("h100-80gb", "float32", 0.5), ("h100-80gb", "fp8-mixed", 1.5),
        ("a100-80gb", "fp8-mixed", 1), ("cpu", "float32", 1),
    ):  # fmt: skip
        found = find_gpu(gpu)
        rate = layer_time.rate(found, precision, one)
        assert rate == pytest.approx(factor * found.peak * found.achievable), f"{precision} on {gpu}"


def test_what_is_computed_again():
    one = layer_time.Work(6.0, 3.0, 1.0, 12.0, 7.5, 2.0)
    times = {"none": 0, "attention": 3, "products": 4, "every-second": 5, "full": 10, "operators": 4}
    for recompute, seconds in times.items():
        layout = SimpleNamespace(kept=recompute, flash=True)
        assert layer_time.again(layout, one) == seconds, f"recomputation '{recompute}'"
    stored = SimpleNamespace(kept="attention", flash=False)
    assert layer_time.again(stored, one) == 3 + 1 / 3, "softmax and dropout of stored scores too"


def layer(model, experts: int, moe: bool = True):
    none = replace(PRIOR, kernel=0.0)
    return layer_time.work(model, find_gpu("h100-80gb"), 4096.0, 4096, 1, True, True, False, True, "bf16-mixed",
                           experts, 1.0, moe, none)  # fmt: skip


def test_experts_and_shared_experts_take_their_time():
    """Each token goes to two of eight experts and to the shared ones: products of as many tokens and widths."""
    mixtral, gpu = models.find("mixtral-8x7b"), find_gpu("h100-80gb")
    base, more = (layer(replace(mixtral, top_k=number), 8) for number in (2, 4))
    shared = layer(replace(mixtral, shared_experts=2), 8)
    flops = 2 * 4096 * 3 * 4096 * 14336  # of one more expert for each token
    each = flops / layer_time.rate(gpu, "bf16-mixed", PRIOR)
    assert more.products - base.products == pytest.approx(2 * each, rel=0.1), "two experts more for each token"
    wide = [(4096, 4096, 4 * 14336), (4096, 2 * 14336, 4096)]  # two of them, side by side, of all tokens
    alone = sum(layer_time.product(*shape, gpu, "bf16-mixed", replace(PRIOR, kernel=0.0)) for shape in wide)
    assert shared.products - base.products == pytest.approx(alone), "two shared experts"
    assert shared.elementwise == pytest.approx(more.elementwise), "as much element-wise work as two experts more"
    assert base.backward_core == 2.5 * base.core, "fused attention computes its scores again"


def test_published_hardware_is_what_the_table_has():
    """The best of measured products over the data sheet's peak."""
    rows = {row["accelerator"].split()[0].lower(): row for row in reversed(published.rows("hardware_mamf_bf16.csv"))}
    for gpu in ("a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "gb200-nvl72"):
        row = rows[gpu.split("-")[0]]
        found = find_gpu(gpu).peak, find_gpu(gpu).achievable
        assert found == (float(row["spec_bf16_tflops"]) * 1e12, float(row["efficiency"])), gpu
