"""python -m common.generate: the text that the model of a run writes, whatever wrote its checkpoint."""

from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, configure, refused, saved, train

from common import generate
from common.lab.launch import launch
from common.model import GPT
from common.sample import sample

LINE = ["--prompt", "def a", "--length", "40"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two steps: in shards by hand, in stages, and of experts."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "shards": "--mesh shard=2 --by-hand",
        "stages": "--mesh pipeline=2",
        "experts": "--mesh expert=2 --by-hand",
    }
    line = "--lr 0.03 --warmup-steps 0 --checkpoint-every 1"
    configs = [configure(f"{kind} {line}", 2, **SMALL, steps=2, run_dir=folder / name) for name, kind in kinds.items()]
    launch(train, 2, (configs,))
    return folder


def written(capsys, *argv) -> str:
    generate.main([*map(str, argv), *LINE])
    return capsys.readouterr().out.removesuffix("\n")


def test_it_is_what_the_trained_model_writes(runs, capsys):
    """The model is put together here from the checkpoint's tensors, by name."""
    for name in ("shards", "stages"):
        tensors = saved(runs / name / "checkpoint-000002")
        model = GPT(2, 32, 4, 16)
        for parameter, value in model.named_parameters():
            value.data = tensors[f"model.{parameter}"]
        torch.set_num_threads(1)
        text = written(capsys, runs / name)
        assert text == sample(model, 16, 40, "def a") and text.startswith("def a") and len(text) == 45
        assert text != written(capsys, runs / name, "--step", 1), "an earlier checkpoint is another model"
        other = written(capsys, runs / name, "--seed", 1)
        assert other != text, "another seed draws other bytes"
        assert other == written(capsys, runs / name, "--seed", 1), "the same seed draws the same"
        cold = {written(capsys, runs / name, "--temperature", 0, "--seed", seed) for seed in (0, 1)}
        assert len(cold) == 1, "the likeliest byte needs no seed"


def test_what_cannot_write_is_refused_in_one_line(runs):
    for argv, words in (
        ((runs / "none",), (str(runs / "none"), "config.json")),
        ((runs / "shards", "--step", 7), ("7", "1, 2")),
        ((runs / "experts",), (str(runs / "experts"), "experts")),
        ((runs / "shards", "--temperature", -1), ("--temperature", "-1")),
        ((runs / "shards", "--temperature", "inf"), ("--temperature", "inf")),
        ((runs / "shards", "--length", 0), ("--length", "1", "0")),
        ((runs / "shards", "--prompt", ""), ("--prompt",)),
    ):
        with refused(*words):
            generate.main([*map(str, argv)])
    with refused("--task images", "text"):
        generate.model_of(SimpleNamespace(settings=SimpleNamespace(task="images"), unit="examples", path="run"))
