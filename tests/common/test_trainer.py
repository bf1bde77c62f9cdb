"""What people expect of a trainer: AdamW's numbers, clipping, peak memory and MFU, a sample."""

import math
import re
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import SMALL, configure, metrics, train

from common import meter
from common.lab.launch import launch
from common.meter import operations, peak, peak_memory
from common.model import GPT
from common.record import Record
from common.sample import sample

TEXT = SMALL | {"steps": 3, "checkpoint_every": 0}


def observed(configs) -> list[tuple]:
    """On a rank: train; of each run AdamW's numbers and what it clips to."""
    seen, log = [], Record.log

    def look(record, step, *numbers):
        if step == 0:
            group = record.strategy.optimizer.param_groups[0]
            seen.append((group["betas"], group["weight_decay"], record.strategy.max_norm))
        log(record, step, *numbers)

    Record.log = look
    train(configs)
    return seen


def test_the_options_reach_the_optimizer_and_the_metrics(tmp_path):
    line = "--weight-decay 0.3 --beta1 0.8 --beta2 0.99 --max-norm 0.01 --lr-schedule cosine --warmup-steps 1"
    kinds = {"ddp": "pytorch", "fsdp": "by-hand", "pipeline": "by-hand"}
    names = [f"{name} {case}" for name in kinds for case in ("base", "other")]
    configs = [
        configure(
            line if name.endswith("other") else "", size=2, strategy=name.split()[0], optimizer="adamw",
            implementation=kinds[name.split()[0]], run_dir=tmp_path / name, **TEXT,
        )
        for name in names
    ]  # fmt: skip
    seen = launch(observed, 2, (configs,), timeout=120)[1]
    for name, told in zip(names, seen, strict=True):
        assert told == (((0.8, 0.99), 0.3, 0.01) if name.endswith("other") else ((0.9, 0.95), 0.1, 1.0)), name
    other = metrics(tmp_path / "ddp other")
    assert [r["learning_rate"] for r in other] == pytest.approx([2e-3, 2e-3 * 0.55, 2e-3 * 0.1])
    base = metrics(tmp_path / "ddp base")
    assert base[0]["loss"] == other[0]["loss"] and base[2]["loss"] != other[2]["loss"]
    for record in base + other:
        assert 50e6 < record["peak_memory_bytes"] < 50e9
        assert 0 < record["mfu"] < 1.5  # of two noisy cores; the peak is measured on one of them


# --- memory and MFU -------------------------------------------------------------------------------------------


def test_operations_are_those_of_the_formula():
    """Against a count of the model's matrix multiplications, forward and twice as many backward."""
    config = SimpleNamespace(layers=3, width=32, heads=4, context=16, batch_size=5)
    from torch.utils.flop_counter import FlopCounterMode

    model, tokens = GPT(3, 32, 4, 16), torch.zeros(5, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    # It counts nothing for the CPU's fused attention: two products of [time, time, width / heads] for each head.
    attention = 2 * 2 * 5 * 4 * 16 * 16 * 8 * 3
    assert operations(config) == 3 * (counter.get_total_flops() + attention)


def test_mfu_is_of_all_ranks_and_of_models_whose_operations_are_known(monkeypatch):
    """A step of 2 seconds on 4 ranks, each of which could do 1e9 operations a second."""
    monkeypatch.setattr(meter.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(meter, "peak", lambda device: 1e9)
    shape = {"layers": 3, "width": 32, "context": 16, "batch_size": 5}
    config = SimpleNamespace(task="text", strategy_class=SimpleNamespace(model_class=GPT), **shape)
    said = meter.Usage(config, torch.device("cpu"))(2.0)
    assert said["mfu"] == operations(config) / 8e9
    mixture = SimpleNamespace(**vars(config) | {"strategy_class": SimpleNamespace(model_class=torch.nn.Module)})
    pictures = SimpleNamespace(**vars(config) | {"task": "images"})
    for other in (mixture, pictures):
        assert meter.Usage(other, torch.device("cpu"))(2.0)["mfu"] is None, "mixtures and pictures have none"


def test_a_cores_peak_is_its_fastest_product_and_memory_is_in_bytes(monkeypatch):
    clock = iter([0, 3, 10, 11, 20, 25, 30, 32])
    with monkeypatch.context() as patch:
        patch.setattr(meter.time, "perf_counter", lambda: next(clock))
        assert peak(torch.device("cpu")) == 2 * 256**3 / 1
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7))
    for platform, size in (("linux", 7 * 1024), ("darwin", 7)):
        monkeypatch.setattr(meter.sys, "platform", platform)
        assert peak_memory(torch.device("cpu")) == size, f"bytes on {platform}"
    monkeypatch.setitem(sys.modules, "resource", None)
    about = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=5, wset=4, rss=3))
    monkeypatch.setattr(psutil, "Process", lambda: about)
    assert peak_memory(torch.device("cpu")) == 5, "bytes on Windows, which has no module resource"


def test_peaks_and_memory(monkeypatch):
    assert 1e8 < peak(torch.device("cpu")) < 1e14
    names = iter(["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Some other GPU"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    gpu = torch.device("cuda", 0)
    assert [peak(gpu) for _ in range(3)] == [989e12, 756e12, None]
    names = ["NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "NVIDIA L4", "Tesla V100-SXM2-32GB", "Tesla T4", "NVIDIA H200"]
    names = iter(names)
    assert [peak(gpu) for _ in range(6)] == [312e12, 362e12, 121e12, 125e12, 65e12, 989e12], "dense, without sparsity"
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 11)
    assert peak_memory(gpu) == 11, "the most that was allocated"
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(100_000_000)
    assert peak_memory(torch.device("cpu")) > max(before, 4 * block.numel())


# --- sample ---------------------------------------------------------------------------------------------------


class Alphabet(torch.nn.Module):
    """After each byte the next one, surely; after z a byte that is no text."""

    def forward(self, tokens):
        logits = torch.full((*tokens.shape, 256), -1e9)
        following = torch.where(tokens == ord("z"), 200, tokens + 1)
        return logits.scatter(-1, following.unsqueeze(-1) % 256, 0.0)


def test_a_sample_is_what_the_model_says():
    assert sample(Alphabet(), context=4, length=3, prompt="a") == "abcd"
    assert sample(Alphabet(), context=2, length=5, prompt="a") == "abcdef"  # more than it can look back to
    assert sample(Alphabet(), context=4, length=2, prompt="y") == "yz·"
    assert sample(Alphabet(), context=4, length=2, prompt="}") == "}~·", "127 is no letter"
    assert sample(Alphabet(), context=4, length=1, prompt="\t") == "·\n", "lines are kept"
    torch.manual_seed(0)
    model = GPT(1, 16, 2, 8)
    assert sample(model, 8, 40) == sample(model, 8, 40)


class Coin(torch.nn.Module):
    """After each byte an "a", or a seventh as likely a "b"."""

    def forward(self, tokens):
        logits = torch.full((*tokens.shape, 256), -math.inf)
        logits[..., ord("a")], logits[..., ord("b")] = 2.0, 0.0
        return logits


def test_a_higher_temperature_makes_what_is_unlikely_likelier():
    found = [sample(Coin(), 4, 300, prompt="a", temperature=t).count("b") for t in (0.1, 1.0, 100.0)]
    assert found[0] == 0 and 20 < found[1] < 60 and 120 < found[2] < 180, f"of 300 bytes: {found}"


# A heading that has one of these words, and the line below it.
WRITTEN = re.compile(r"--- .*\b(before|after)\b.*\n(?:\[rank 0\] )?(.*)")


def test_a_run_shows_what_it_wrote_before_and_after(tmp_path, capfd):
    names = ["ddp", "fsdp", "pipeline"]
    line = "--sample 30 --lr 0.03 --warmup-steps 0 --strategy"
    configs = [configure(f"{line} {name}", size=2, run_dir=tmp_path / name[:6], **TEXT) for name in names]
    launch(train, 2, (configs,), timeout=120)
    said = capfd.readouterr().out
    texts = WRITTEN.findall(said)
    assert [when for when, _ in texts] == ["before", "after"] * len(names)
    assert said.count("loss of 3 steps") == len(names), "the curve is that of the whole run"
    assert len({text for when, text in texts if when == "before"}) == 1  # the same initial weights
    assert texts[0][1] != texts[1][1] and all(text.startswith("def ") for _, text in texts)


def test_what_it_writes_begins_as_the_text_that_it_was_given(tmp_path, capfd):
    (tmp_path / "poem.txt").write_text("Shall I compare thee to a summer's day?\n" * 400)
    line = f"--sample 9 --text {tmp_path / 'poem.txt'} --strategy ddp"
    launch(train, 2, ([configure(line, size=2, run_dir=tmp_path / "run", **TEXT)],), timeout=120)
    texts = WRITTEN.findall(capfd.readouterr().out)
    assert len(texts) == 2 and all(text.startswith("Shal") for _, text in texts)
