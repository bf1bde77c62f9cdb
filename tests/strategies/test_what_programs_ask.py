"""What the programs that readers copy ask PyTorch for, and what makes no difference to their numbers: what is gathered
at once, how many micro-batches, which workers; and how the ranks' loaders of chapter 03 are made."""

import runpy
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.distributed.pipelining as pipelining
import torch.distributed.tensor.parallel as parallel
from helpers import launcher

from common import ROOT
from common.data import Plan
from course import start
from course.ddp import feeding, loading
from course.strategies import BY_AXES


def test_how_a_script_starts(monkeypatch, capsys):
    calls, here = [], SimpleNamespace(chapter="03_ddp")
    config = SimpleNamespace(entry=here, strategy="ddp", dry_run=False, main=lambda config: calls.append("trained"))
    monkeypatch.setattr(start, "parse", lambda table, default, **how: calls.append((default, how)) or config)
    monkeypatch.setattr("course.dry_run.dry_run", lambda config: calls.append("a dry run"))
    how = {"by_axes": BY_AXES, "auto": start.pick}
    start.start("ddp", "accelerate")
    config.dry_run = True
    start.start()
    assert calls == [
        ("ddp", how | {"default_implementation": "accelerate"}), "trained",
        (None, how | {"default_implementation": "pytorch"}), "a dry run",
    ], "what the command line is read with, and what comes of it"  # fmt: skip
    here.chapter, config.strategy = "06_fsdp", "fsdp"
    start.start()  # from the repository's root
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        start.start("ddp")
    told = "error: --strategy fsdp lives in 06_fsdp/: start it there, or from the repository's root\n"
    assert (end.value.code, capsys.readouterr().err) == (2, told), "a chapter's script is for its own strategies"


def test_how_feeding_makes_its_loader(monkeypatch):
    asked, samplers = [], []
    sampler = SimpleNamespace(set_epoch=lambda epoch: samplers.append(epoch))
    monkeypatch.setattr(feeding, "DistributedSampler", lambda *data, **how: samplers.append(how) or sampler)
    monkeypatch.setattr(feeding, "DataLoader", lambda *given, **how: asked.append((given[1:], how)) or [])
    monkeypatch.setattr(feeding.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(feeding.dist, "get_world_size", lambda: 2)
    for device in ("cpu", "cuda"):
        feeding.main(torch.device(device))
        how = {"sampler": sampler, "drop_last": True, "num_workers": 1, "persistent_workers": True}
        assert asked.pop() == ((2,), how | {"pin_memory": device == "cuda"}), f"DataLoader on {device}"
    assert samplers == [{"seed": 0, "drop_last": True}, 0, 1] * 2, "the sampler, and the epochs that it is told"


def test_how_workers_are_started(monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "DataLoader", lambda slices, **how: asked.append((slices, how)) or [])
    dataset, plan = object(), Plan(5, 12, 24, 0, 2)
    assert list(loading.shard_stream_workers(dataset, plan, 1)) == []
    ((slices, how),) = asked
    assert slices.arguments == (dataset, plan, 1), "from the step that the run goes on with"
    assert isinstance(how.pop("generator"), torch.Generator), "the model's random numbers are left alone"
    method = "fork" if sys.platform == "linux" else "spawn"
    assert how == {
        "batch_size": None, "num_workers": 2, "multiprocessing_context": method,
        "worker_init_fn": loading.ignore_interrupt,
    }, "what DataLoader is asked for"  # fmt: skip
    monkeypatch.setattr(loading.signal, "signal", lambda *given: asked.append(given))
    loading.ignore_interrupt(0)
    assert asked[1] == (signal.SIGINT, signal.SIG_IGN), "a worker ignores Ctrl-C: its rank ends it"
    for system, method in (("linux", "fork"), ("darwin", "spawn"), ("win32", "spawn")):
        monkeypatch.setattr(loading.sys, "platform", system)
        assert runpy.run_path(loading.__file__)["START_METHOD"] == method, f"how workers are started on {system}"


def run(program: str, monkeypatch, folder, epochs: int = 0) -> None:
    """As plain python would, in this process; without training."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [program, str(epochs)])
    with launcher():
        runpy.run_path(str(ROOT / program), run_name="__main__")


def test_fsdp_gathers_each_linear_layer_on_its_own(monkeypatch, tmp_path):
    asked, fully_shard = [], fsdp.fully_shard
    monkeypatch.setattr(fsdp, "fully_shard", lambda unit, **how: asked.append(unit) or fully_shard(unit, **how))
    run("06_fsdp/standalone.py", monkeypatch, tmp_path)
    model = asked[-1]
    assert asked == [model[0], model[2], model[4], model], "units: each linear layer, then what is left"


def test_a_pipelines_batch_is_cut_into_eight(monkeypatch, tmp_path):
    asked, schedule = [], pipelining.Schedule1F1B
    monkeypatch.setattr(pipelining, "Schedule1F1B", lambda stage, **how: asked.append(how) or schedule(stage, **how))
    run("05_pipeline/standalone.py", monkeypatch, tmp_path)
    assert asked == [{"n_microbatches": 8, "loss_fn": torch.nn.functional.cross_entropy}], "the schedule 1F1B"


def test_which_layers_tensor_parallelism_splits_how(monkeypatch, tmp_path):
    asked, parallelize = [], parallel.parallelize_module

    def noting(model, mesh, plan):
        asked.append({name: type(style).__name__ for name, style in plan.items()})
        return parallelize(model, mesh, plan)

    monkeypatch.setattr(parallel, "parallelize_module", noting)
    run("04_model_parallel/standalone.py", monkeypatch, tmp_path)
    assert asked == [{"0": "ColwiseParallel", "2": "RowwiseParallel"}], "layer: split by outputs, by inputs"


@pytest.mark.parametrize("program", ["02_data_parallel/standalone.py", "03_ddp/standalone.py"])
def test_a_crash_while_saving_leaves_the_old_checkpoint(program, monkeypatch, tmp_path):
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda state, path: saved.append(path) or save(state, path))
    run(program, monkeypatch, tmp_path, epochs=1)
    (found,) = tmp_path.iterdir()
    assert saved == [f"{found.name}.part"], "written beside the checkpoint, and renamed when it is whole"


def test_what_data_parallel_says_of_processes_and_gpus(monkeypatch, tmp_path, capsys):
    program = "02_data_parallel/standalone.py"
    run(program, monkeypatch, tmp_path)
    alone = "GPU(s) here, and DataParallel needs two to divide a batch: one device trains on all of it\n"
    assert capsys.readouterr().out == f"{torch.cuda.device_count()} {alone}"
    with launcher(1, 2), pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    told = "DataParallel is a single process: the other ones of torchrun have nothing to do\n"
    assert (end.value.code, capsys.readouterr().out) == (None, told), "what a second process says"
