"""Engines: each trains as one process does, in every number, and what its page says of it is so.

Needs requirements-engines.txt; without it the file is not collected (tests/conftest.py). `make test-engines` runs it.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import SMALL, as_options, configure, do_not_draw, metrics, numbers, refused, saved, write_facts
from torch import nn

from common import ROOT, engine_files, manifest, own, runs
from common.data import Plan, global_batch, micro_batches, shard
from common.errors import UserError
from common.lab.equality import COVERING, Batches, NotEqual, prove, sgd, tied
from common.lab.launch import RankFailed, free_port, launch
from common.lab.ledger import Ledger
from common.learning_rate import learning_rate
from common.mesh import make_mesh
from common.strategy import Setup
from common.task import make_task
from course.fsdp import with_qlora
from course.strategies import STRATEGIES, load

OF = {name: entry.engines for name, entry in STRATEGIES.items() if entry.engines}
ENGINES = [(name, engine) for name, of in OF.items() for engine in of]
STEPWISE = [(name, engine) for name, engine in ENGINES if engine != "trainer"]  # which has a loop of its own
# All covering cases on two ranks; on one and on four, one with AdamW and one with SGD, accumulation, frozen weights.
CASES = {1: COVERING[1:3], 2: COVERING, 4: COVERING[1:3]}
TEXT = SMALL | {"steps": 3, "checkpoint_every": 0, "warmup_steps": 2}


def test_these_are_the_engines_that_are_promised():
    assert set(ENGINES) == {
        ("ddp", "accelerate"), ("ddp", "fabric"), ("zero1", "deepspeed"), ("zero2", "deepspeed"),
        ("fsdp", "deepspeed"), ("fsdp", "accelerate"), ("fsdp", "trainer"),
    }  # fmt: skip


@pytest.mark.parametrize("nproc", CASES)
@pytest.mark.parametrize("strategy, engine", STEPWISE)
def test_equals_one_process(strategy, engine, nproc):
    proofs = prove(load(strategy, engine), nproc, cases=CASES[nproc])
    assert [proof.case for proof in proofs] == CASES[nproc]


def test_deepspeed_with_offload_equals_one_process():
    cls = load("fsdp", "deepspeed")
    proofs = prove(cls, 2, options=cls.Options(offload=True), cases=COVERING[:2])
    assert len(proofs) == 2


class DividesTwice(load("ddp", "accelerate")):
    """Divides by the number of micro-batches, as PyTorch's loop does, before Accelerate's backward does."""

    def step(self, micro_batches):
        backward = type(self.accelerator).backward
        self.accelerator.backward = lambda loss: backward(self.accelerator, loss / len(micro_batches))
        return super().step(micro_batches)


class StepsEachTime(load("fsdp", "deepspeed")):
    """Does not tell DeepSpeed how many micro-batches a step has."""

    def step(self, micro_batches):
        self.engine.set_train_batch_size = lambda examples: None
        return super().step(micro_batches)


@pytest.mark.parametrize("wrong, what", [(DividesTwice, "grad_norm"), (StepsEachTime, "loss")])
def test_a_loop_that_leaves_the_wrong_thing_to_its_engine_is_refused(wrong, what):
    with pytest.raises(NotEqual) as refusal:
        prove(wrong, 2, cases=COVERING[2:3])
    assert refusal.value.what == what


def train(configs) -> list[str]:
    """On a rank: run each; what a parameter is afterwards."""
    do_not_draw()
    kinds = []
    from common.run import Run

    leave = Run.__exit__

    def look(self, *error):
        kinds.append(type(next(self.strategy.model.parameters())).__name__)
        return leave(self, *error)

    Run.__exit__ = look
    for config in configs:
        config.main(config)
    return kinds


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_engine_gives_the_numbers_and_the_checkpoint_of_pytorch(tmp_path, accumulation):
    more = TEXT | {"accumulation_steps": accumulation}
    runs = [(name, kind) for name in OF for kind in ("pytorch", *OF[name])]
    for number, (name, kind) in enumerate(runs):  # a launch for each: an engine keeps state of its own in a process
        config = configure(size=2, run_dir=tmp_path / str(number), strategy=name, implementation=kind, **more)
        kinds = launch(train, 2, ([config],))
        if name == "fsdp" and kind in ("accelerate", "trainer"):
            assert kinds == [["DTensor"]] * 2, "on CPUs Accelerate takes DDP instead, if nothing is done about it"
    expected, state = numbers(tmp_path / "0"), saved(tmp_path / "0" / "checkpoint-000003")
    assert len(expected) == 6
    for number, who in enumerate(runs):
        assert numbers(tmp_path / str(number)) == pytest.approx(expected, rel=3e-6), who
        other = saved(tmp_path / str(number) / "checkpoint-000003")
        assert other.keys() == state.keys(), who
        for name, tensor in state.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=3e-6, msg=f"{who}: {name}")


def test_bf16_differs_for_a_reason(tmp_path):
    """Accelerate and Fabric compute in bfloat16 as autocast does. DeepSpeed's bf16 keeps bfloat16 weights beside the
    float32 ones, and no operation stays in float32."""
    found = {}
    for name, kind in [("ddp", "pytorch"), ("ddp", "accelerate"), ("ddp", "fabric"), ("zero1", "deepspeed")]:
        config = configure(
            size=2, run_dir=tmp_path / kind, strategy=name, implementation=kind, precision="bf16", **TEXT
        )
        launch(train, 2, ([config],))
        found[kind] = [record["loss"] for record in metrics(tmp_path / kind)]
    single = [record["loss"] for record in metrics(tmp_path / "pytorch")]
    assert found["accelerate"] == pytest.approx(single, rel=1e-5)
    assert found["fabric"] == pytest.approx(single, rel=1e-5)
    assert found["deepspeed"] == pytest.approx(single, rel=1e-2)
    assert found["deepspeed"] != pytest.approx(single, rel=1e-5)


def loaded(accumulate: int):
    from accelerate import Accelerator

    from common.data import Text
    from course.ddp.with_accelerate import FEEDING

    rank = Accelerator(cpu=True).process_index
    plan, dataset = Plan(5, 12, 36, rank, 2, accumulate), Text(16)
    ways = {"ours": shard, **FEEDING}
    return {
        (name, start): [part for step in way(dataset, plan, start) for pair in step for part in pair]
        for name, way in ways.items()
        for start in (0, 2)
    }


def test_both_ways_of_accelerate_load_what_the_course_loads():
    for ways in launch(loaded, 2, (3,)):
        assert len(ways["ours", 0]) == 3 * 3 * 2
        for (name, start), theirs in ways.items():
            ours = ways["ours", start]
            assert len(theirs) == len(ours) and all(map(torch.equal, theirs, ours)), f"{name} from step {start} on"


def last_batches() -> dict:
    """What Accelerate makes of 10 examples in batches of 4 on two ranks."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    found = {}
    for even in (True, False):
        for split in (True, False):
            how = DataLoaderConfiguration(split_batches=split, even_batches=even)
            loader = Accelerator(cpu=True, dataloader_config=how).prepare(DataLoader(torch.arange(10), 4))
            found[even, split] = [batch.tolist() for batch in loader]
    return found


def test_what_even_batches_and_split_batches_do_with_a_last_batch():
    first, second = launch(last_batches, 2)
    assert (first[True, True], second[True, True]) == ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]])
    assert (first[True, False], second[True, False]) == ([[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]])
    assert (first[False, False], second[False, False]) == ([[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]])


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


SETTINGS = as_options(TEXT)


@pytest.mark.parametrize("folder, settings", [("03_ddp", "accelerate_ddp.yaml"), ("06_fsdp", "accelerate_fsdp2.yaml")])
def test_accelerate_launch_reads_the_yaml(tmp_path, folder, settings):
    file = str(ROOT / "configs" / "engines" / settings)
    start = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", file)
    more = ("with_accelerate.py", "--distributed", *SETTINGS, f"--run-dir={tmp_path / 'a'}")
    done = command(*start, *more, cwd=ROOT / folder)
    assert done.returncode == 0, done.stderr[-2000:]
    launch(train, 2, ([configure(size=2, run_dir=tmp_path / "b", strategy="ddp", **TEXT)],))
    assert numbers(tmp_path / "a") == pytest.approx(numbers(tmp_path / "b"), rel=3e-6)


def test_deepspeed_reads_the_json(tmp_path):
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "with_deepspeed.py")
    settings = [setting for setting in SETTINGS if "batch-size" not in setting]
    more = ("--distributed", *settings, "--deepspeed-config", str(ROOT / "configs" / "engines" / "zero3.json"))
    done = command(*start, *more, f"--run-dir={tmp_path / 'a'}", cwd=ROOT / "06_fsdp")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "arning" not in done.stderr, "what engines say and means nothing is silenced"
    assert len(metrics(tmp_path / "a")) == 3
    recorded = json.loads((tmp_path / "a" / "config.json").read_text())["config"]
    assert recorded["batch_size"] == 16 * 2 and recorded["precision"] == "bf16" and recorded["offload"]


@pytest.mark.parametrize("line, text", [
    ("--strategy fsdp --implementation deepspeed --deepspeed-config no.json", "-config no.json: .*No such file"),
    ("--strategy fsdp --implementation accelerate --offload", "--offload: Accelerate takes it on GPUs"),
    ("--strategy ddp --implementation accelerate --precision fp16", "fp16: Accelerate scales losses on GPUs"),
    ("--strategy fsdp --implementation accelerate --precision fp16", "fp16.*Accelerate"),
    ("--strategy fsdp --implementation deepspeed --precision fp16 --resume", "--resume.*loss scale of DeepSpeed"),
    ("--strategy zero1 --implementation trainer", "no implementation 'trainer'; it has pytorch, by-hand, deepspeed"),
])  # fmt: skip
def test_what_cannot_work_gets_one_line(line, text, tmp_path):
    if "--resume" in line:  # of a run that has a checkpoint
        strategy, implementation = line.split()[1], line.split()[3]
        folder = tmp_path / "run" / "checkpoint-000002"
        folder.mkdir(parents=True)
        (folder / manifest.MANIFEST).write_text(manifest.seal({"step": 2}, {}))
        config = {"strategy": strategy, "implementation": implementation}
        write_facts(tmp_path / "run", config, world_size=2)
    with pytest.raises(UserError, match=text) as error:
        configure(line, 2, run_dir=tmp_path / "run")
    assert "\n" not in str(error.value)


def test_settings_of_a_deepspeed_file_are_those_of_the_run_and_contradict_no_option(tmp_path):
    def configured(settings, line=""):
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        line = f"--strategy zero2 --implementation deepspeed --deepspeed-config {tmp_path / 'ds.json'} {line}"
        return configure(line, 2, run_dir=tmp_path / "run")

    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    settings = {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    recorded = configured(settings | {"gradient_clipping": 0.5}, "--max-norm 0.5").settings()
    told = {"precision": "bf16", "accumulation_steps": 2, "max_norm": 0.5, "offload": True}
    assert {name: recorded[name] for name in told} == told
    of_one = configured({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}).settings()
    assert of_one["batch_size"] == 3 * 4 * 2, "examples of a micro-batch, micro-batches, ranks"
    assert configured({"gradient_clipping": 0}).max_norm == float("inf"), "DeepSpeed's 0 is no clipping"
    for wrong, line, text in [
        ({"zero_optimization": {"stage": 3}}, "", "has stage 3, and --strategy zero2 is stage 2"),
        ({"zero_optimization": {"stage": 2}}, "--offload", "no offload_optimizer"),
        ({"bf16": {"enabled": False}}, "--precision bf16", "--precision fp32, and --precision is bf16"),
        (settings, "--precision fp16", "--precision bf16, and --precision is fp16"),
        (settings, "--accumulation-steps 3", "--accumulation-steps 2, and --accumulation-steps is 3"),
        ({"optimizer": {"type": "Adam"}}, "", "makes the optimizer itself"),
        ({"train_batch_size": 8}, "--batch-size 12", "--batch-size 8, and --batch-size is 12"),
        ([1], "", "no settings of DeepSpeed"),
        ({"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16"}, "", "no settings of DeepSpeed"),
        ({"output_dir": "out", "bf16": True}, "", "bf16.*; DeepSpeed's are like"),
    ]:
        with pytest.raises(UserError, match=text) as error:
            configured(wrong, line)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("variables, name, line, says", [
    ({"MIXED_PRECISION": "bf16", "GRADIENT_ACCUMULATION_STEPS": "2"}, "ddp", "", ""),
    ({"MIXED_PRECISION": "bf16"}, "ddp", "--precision fp16", "--precision bf16, and --precision is fp16"),
    ({"MIXED_PRECISION": "no"}, "ddp", "--precision bf16", "is 'no' in its file, .* write mixed_precision: bf16"),
    ({"MIXED_PRECISION": "no", "USE_FSDP": "true"}, "ddp", "", "its file is for FSDP, and this training is DDP"),
    ({"MIXED_PRECISION": "no"}, "fsdp", "", "its file is for DDP, and this training is FSDP"),
    ({"MIXED_PRECISION": "no", "USE_DEEPSPEED": "true"}, "ddp", "", "its file is for DEEPSPEED"),
    ({"MIXED_PRECISION": "fp8"}, "ddp", "", "mixed_precision fp8"),
])  # fmt: skip
def test_settings_of_accelerates_file_are_those_of_the_run_and_contradict_no_option(
    monkeypatch, tmp_path, variables, name, line, says
):
    for key, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_{key}", value)
    line = f"--strategy {name} --implementation accelerate {line}"
    if not says:
        recorded = configure(line, 2, run_dir=tmp_path / "run").settings()
        assert (recorded["precision"], recorded["accumulation_steps"]) == ("bf16", 2)
        return
    with pytest.raises(UserError, match=says) as error:
        configure(line, 2, run_dir=tmp_path / "run")
    assert "\n" not in str(error.value)


def bytes_reduced(strategy: str, engine: str) -> tuple[int, int]:
    """Bytes that the all-reduces of a step of three micro-batches carry, and those of the gradients."""
    training = load(strategy, engine)(tied(), sgd, Setup(make_mesh({"data": -1})))
    batch = micro_batches(Batches(), torch.arange(24), dist.get_rank(), 2, 3, "cpu")
    training.step(batch)
    with Ledger() as ledger:
        training.step(batch)
    payloads = [entry.payload for entry in ledger.entries if entry.operation == "all_reduce"]
    return sum(payloads), 4 * sum(p.numel() for p in training.model.parameters())


@pytest.mark.parametrize("engine", OF["ddp"])
def test_gradients_are_sent_in_the_last_micro_batch_alone(engine):
    for carried, gradients in launch(bytes_reduced, 2, ("ddp", engine)):
        assert gradients <= carried < gradients + 64, "once the gradients, and beside them the loss"


@pytest.mark.parametrize("name, engine", ENGINES)
def test_a_run_that_is_resumed_by_an_engine_is_the_run_that_never_stopped(tmp_path, name, engine):
    """A run that PyTorch's implementation begins, and the engine takes up, twice: numbers and last checkpoint."""
    how = TEXT | {"strategy": name, "implementation": engine, "optimizer": "adamw", "weight_decay": 0.1}
    how |= {"warmup_steps": 6}  # each step has a rate of its own
    launch(train, 2, ([configure(size=2, run_dir=tmp_path / "whole", **how | {"steps": 4})],))
    begun = how | {"steps": 2, "implementation": "pytorch"}
    launch(train, 2, ([configure(size=2, run_dir=tmp_path / "half", **begun)],))
    for more in (f"--steps 3 --strategy {name} --implementation {engine}", "--steps 4"):
        launch(train, 2, ([configure(f"--resume {more}", 2, run_dir=tmp_path / "half")],))
    whole, half = (metrics(tmp_path / run) for run in ("whole", "half"))
    assert [record["step"] for record in half] == [1, 2, 3, 4]
    assert [record["learning_rate"] for record in half] == [record["learning_rate"] for record in whole]
    assert numbers(tmp_path / "half") == pytest.approx(numbers(tmp_path / "whole"), rel=3e-6)
    expected, found = (saved(tmp_path / run / "checkpoint-000004") for run in ("whole", "half"))
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name, engine", ENGINES)
def test_an_engine_trains_on_two_nodes_as_on_one(tmp_path, name, engine):
    """Two agents, each with a rank, as on two nodes; here both on this one."""
    launch(train, 2, ([configure(size=2, run_dir=tmp_path / "one", strategy="ddp", **TEXT)],))
    port, environment = free_port(), os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = ["--distributed", *SETTINGS, f"--strategy={name}", f"--implementation={engine}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node_rank={node}",
             "--master_addr=127.0.0.1", f"--master_port={port}", str(ROOT / "distributed_training.py"), *options,
             f"--run-dir={tmp_path / 'two'}"],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]  # fmt: skip
    said = [agent.communicate(timeout=600)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)[-3000:]
    assert numbers(tmp_path / "two") == pytest.approx(numbers(tmp_path / "one"), rel=3e-6)


# --- a model and data of one's own ----------------------------------------------------------------------------

OWN = {"steps": 3, "batch_size": 8, "validate_every": 3, "lr": 1e-3, "log_every": 100}
WAYS = [
    ("ddp", "pytorch"),
    ("ddp", "by-hand"),
    ("zero2", "by-hand"),
    ("fsdp", "pytorch"),
    ("fsdp", "by-hand"),
    *ENGINES,
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The program of docs/, in the folder where it has made a base, a tokenizer and data."""
    folder = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        program = own.module_of(str(ROOT / "docs" / "your_llama.py"))
        program.make()
        program.data()  # which keeps what it has tokenized
        yield program


def own_run(run_dir, program: str, data: str = "", size: int = 2, line: str = "", **settings):
    """The numbers of a run, and its losses on what is not trained on."""
    task = f"{ROOT / 'docs' / program}{data}"
    config = configure(line, size, run_dir=run_dir, **(OWN | {"task": task} | settings if not line else settings))
    launch(train, size, ([config],), timeout=300)
    return numbers(run_dir), [line["validation_loss"] for line in metrics(run_dir) if "validation_loss" in line]


@pytest.mark.parametrize("program", ["your_llama.py", "your_vit.py"])
def test_a_model_of_ones_own_trains_in_every_way_as_on_one_process(llama, tmp_path, program):
    alone, alone_held_out = own_run(tmp_path / "alone", program, size=1, strategy="ddp")
    assert len(alone) == 6 and len(alone_held_out) == 1
    for name, kind in WAYS:
        run = tmp_path / f"{name}-{kind}"
        found, held_out = own_run(run, program, strategy=name, implementation=kind)
        assert found == pytest.approx(alone, rel=2e-5), (name, kind)
        assert held_out == pytest.approx(alone_held_out, rel=2e-5), (name, kind)
    found, _ = own_run(tmp_path / "dispatch", program, strategy="ddp", loading="dispatch")
    assert found == pytest.approx(alone, rel=2e-5), "rank 0 reads for all"


NO_BLOCKS = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(32, 3))

def data():
    numbers = torch.randint(9, (64, 4), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(numbers, numbers.sum(1) % 3), None
"""


def test_engines_that_gather_block_by_block_take_a_model_without_a_list_of_blocks(tmp_path):
    (tmp_path / "mine.py").write_text(NO_BLOCKS)
    how = OWN | {"task": str(tmp_path / "mine.py"), "validate_every": 0}
    for name, kind in (("ddp", "pytorch"), ("fsdp", "accelerate"), ("fsdp", "trainer")):
        config = configure("", 2, run_dir=tmp_path / kind, strategy=name, implementation=kind, **how)
        launch(train, 2, ([config],), timeout=300)
        assert numbers(tmp_path / kind) == pytest.approx(numbers(tmp_path / "pytorch"), rel=2e-5), kind


def test_a_llama_of_ones_own_is_saved_as_transformers_reads_it_with_the_same_loss(llama, tmp_path, capsys):
    _, (held_out,) = own_run(tmp_path / "run", "your_llama.py", strategy="fsdp")
    runs.main(["export", str(tmp_path / "run"), "--safetensors", "--out", str(tmp_path / "weights.safetensors")])
    for wrong in ("nowhere.safetensors", "your-llama/model-00001-of-00006.safetensors"):
        with refused(wrong, "no weights for this model"):
            llama.save(wrong, str(tmp_path / "wrong"))
    llama.save(str(tmp_path / "weights.safetensors"), str(tmp_path / "saved"))
    said = re.search(r"loss ([\d.]+) on (\d+) examples", capsys.readouterr().out)
    assert float(said[1]) == pytest.approx(held_out, abs=2e-4)


def test_adapters_of_a_vit_are_saved_and_fit_their_base_with_the_same_loss(tmp_path, capsys):
    _, (held_out,) = own_run(tmp_path / "run", "your_vit.py", strategy="fsdp")
    runs.main(["export", str(tmp_path / "run"), "--safetensors", "--out", str(tmp_path / "weights.safetensors")])
    own.module_of(str(ROOT / "docs" / "your_vit.py")).save(str(tmp_path / "weights.safetensors"), str(tmp_path / "a"))
    said = re.search(r"loss ([\d.]+) on (\d+) pictures", capsys.readouterr().out)
    assert float(said[1]) == pytest.approx(held_out, abs=2e-4)


@pytest.mark.parametrize("data, kind", [("", "pytorch"), (":stream", "pytorch"), (":stream", "accelerate")])
def test_what_is_read_goes_on_in_mid_epoch_on_another_number_of_ranks(llama, tmp_path, data, kind):
    how = {"strategy": "ddp", "implementation": kind, "validate_every": 0}
    whole, _ = own_run(tmp_path / "whole", "your_llama.py", data, size=1, **how | {"steps": 4})
    own_run(tmp_path / "half", "your_llama.py", data, size=1, **how | {"steps": 2})
    half, _ = own_run(tmp_path / "half", "your_llama.py", size=2, line="--resume --steps 4")
    assert half == pytest.approx(whole, rel=2e-5)
    if data:
        rows, orders = own.module_of(str(ROOT / "docs" / "your_llama.py")).stream()[0], []
        for epoch in (0, 1, 0):
            rows.set_epoch(epoch)
            orders.append([inputs.tolist() for inputs, _ in itertools.islice(rows, 8)])
        assert orders[0] == orders[2] != orders[1], "each epoch is shuffled anew"


def test_what_is_not_made_for_each_other_gets_one_line(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"task": str(ROOT / "docs" / "your_llama.py"), "run_dir": tmp_path / "run", "strategy": "ddp"}
    with refused("there is no model in your-llama"):
        make_task(configure(**settings))
    llama.make()
    task = make_task(configure(**settings))
    transformers.ViTConfig().save_pretrained("your-llama")
    with refused("model() failed", "ViTConfig"):  # and not a Llama of billions of parameters with random weights
        task.make_model()
    small = llama.LlamaConfig(**llama.CONFIG.to_dict() | {"vocab_size": 100})
    small.save_pretrained("your-llama")
    with refused("model() failed", "the tokenizer has", "the model knows 100"):
        task.make_model()
    for rows, *said in (
        ('{"words": "a"}', "no column 'text'", "words"),
        ("no JSON", "JSON parse error"),  # by the error's cause alone
    ):
        (tmp_path / "your-llama" / "train.jsonl").write_text(rows + "\n")
        with refused("data() failed", *said):
            make_task(configure(**settings))


def held(config) -> int:
    """On a rank: how many bytes its own memory, without mapped files, grew at most while a strategy was made."""
    import gc
    import threading

    from common.ranks import process_group
    from common.task import make_task

    def own_bytes() -> int:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    with process_group() as ranks:
        task, mesh, most, over = make_task(config), make_mesh(config.axes), [0], threading.Event()
        gc.collect()
        before = own_bytes()

        def look():
            while not over.wait(0.001):
                most[0] = max(most[0], own_bytes())

        thread = threading.Thread(target=look)
        thread.start()
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        over.set()
        thread.join()
        assert sum(part.tensor.nbytes for part in strategy.parts()) > 0 and ranks.size == 2
    return most[0] - before


def test_a_base_in_several_files_is_read_into_shards_without_a_whole_copy_on_any_rank(tmp_path, monkeypatch, llama):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llama, "CONFIG", llama.LlamaConfig(**llama.CONFIG.to_dict() | {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}))  # fmt: skip
    llama.make()
    size = sum(file.stat().st_size for file in (tmp_path / "your-llama").glob("*.safetensors"))
    assert size > 150 * 2**20 and len(list((tmp_path / "your-llama").glob("*.safetensors"))) > 10
    config = configure(
        "", 2, run_dir=tmp_path / "run", strategy="fsdp", **OWN | {"task": str(ROOT / "docs/your_llama.py")}
    )
    for grown in launch(held, 2, (config,), timeout=300):
        assert grown < size, "its half, the largest block on its way, and what the allocator keeps of those before"


# --- QLoRA ----------------------------------------------------------------------------------------------------

SMALL_QLORA = engine_files.qlora(str(ROOT / "configs" / "engines" / "fsdp_qlora_small.yaml"))
MORE = {"accumulation_steps": 2, "warmup_steps": 2, "lr_schedule": "cosine", "weight_decay": 0.1, "max_norm": 0.5}
MORE["evaluate_every"] = 1  # which changes nothing
SMALL_LORA = SMALL_QLORA | {
    "quantization": None,
    "training": SMALL_QLORA["training"] | MORE | {"dtype": "float32"},
}


def qlora(settings, base: str = "", out: str = "") -> tuple:
    from common.ranks import process_group

    with process_group() as here:
        losses, found, model, evaluated = with_qlora.train(settings, here.device, base, out)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    return losses, found, names, kinds, evaluated


def test_qlora_trains_adapters_alone_and_shards_all_but_the_scales():
    (alone, whole, *_), *_ = launch(qlora, 1, (SMALL_QLORA,))
    halves = launch(qlora, 2, (SMALL_QLORA,))
    for losses, found, trained, kinds, _ in halves:
        assert losses == pytest.approx(alone, rel=2e-3) and losses[-1] < losses[0] - 0.2
        assert trained and all(re.search(r"\.lora_[AB]\.", name) for name in trained)
        assert kinds == {"DTensor"}
        assert found.pop("scales of the 4-bit blocks") == whole["scales of the 4-bit blocks"]
        assert found == {part: size // 2 for part, size in whole.items() if part in found}
    shapes = with_qlora.bytes_by_part(with_qlora.make_model(SMALL_QLORA, "meta"))
    assert shapes == whole, "what is computed from shapes is what was counted"


def test_adapters_are_trained_as_a_plain_loop_trains_them():
    """With micro-batches, warm-up, a cosine, weight decay and clipping."""

    def plainly():
        how, found = SMALL_LORA["training"], []
        model, text = (
            with_qlora.make_model(SMALL_LORA),
            with_qlora.Data(SMALL_LORA["training"]["context"], "", 256).parts[0],
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, weight_decay=how["weight_decay"])
        for step in range(how["steps"]):
            optimizer.param_groups[0]["lr"] = learning_rate(SimpleNamespace(**how), step)
            losses = []
            for part in global_batch(how["seed"], step, how["batch_size"], text.size).chunk(how["accumulation_steps"]):
                inputs, targets = text.batch(part)
                logits = model(input_ids=inputs).logits.float()
                losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            loss = torch.stack(losses).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, how["max_norm"])
            optimizer.step()
            found.append(loss.item())
        return found

    ((losses, *_),), (expected,) = launch(qlora, 1, (SMALL_LORA,)), launch(plainly, 1)
    assert losses == pytest.approx(expected, rel=1e-5)


def again(settings, base: str, adapter: str, merge: str) -> list[float]:
    from common.ranks import process_group

    with process_group() as here:
        return [*with_qlora.evaluate_saved(settings, here.device, base, adapter, merge).values()]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("base"))
    with_qlora.make_base(SMALL_LORA, quantize=False).save_pretrained(folder)
    return folder


WIDE = SMALL_LORA["lora"] | {"r": 128}  # halves of adapters have 4,096 numbers, and moments of 8 bits
SMALL_PAGED = SMALL_LORA | {"lora": WIDE, "training": SMALL_LORA["training"] | {"optimizer": "paged_adamw_8bit"}}


@pytest.mark.parametrize(
    "settings, exact",
    [(SMALL_LORA, 1e-5), (SMALL_QLORA, 1e-3), (SMALL_PAGED, 1e-3)],
    ids=["LoRA", "QLoRA", "8-bit AdamW"],
)
def test_adapters_are_trained_on_ranks_saved_loaded_and_merged_on_one(tmp_path, base, settings, exact):
    """4-bit layers of bitsandbytes repack what fully_shard has gathered when they are not in training: a loss of
    evaluation on two ranks that is 0.4% off."""
    runs = [launch(qlora, ranks, (settings, base, str(tmp_path / str(ranks)))) for ranks in (1, 2)]
    (alone, parts, *_, evaluated), *_ = runs[0]
    assert ("base, 4 bits" in parts) == (settings == SMALL_QLORA) != ("base in float32" in parts)
    for losses, *_, other in runs[1]:
        assert losses == pytest.approx(alone, rel=exact) and losses[-1] < losses[0] - 0.2
        assert other == pytest.approx(evaluated, rel=exact)
    loaded, merged = launch(again, 1, (settings, base, str(tmp_path / "2"), str(tmp_path / "merged")))[0]
    assert loaded == pytest.approx(evaluated, rel=exact) and merged == pytest.approx(evaluated, rel=exact)


def evaluated_with_dropout(settings) -> tuple[list[float], set[bool], set[bool]]:
    """The loss on the same text thrice, and who is in training before and after it."""
    from common.ranks import process_group

    with process_group() as here:
        model = with_qlora.make_model(settings)
        before = {module.training for module in model.modules()}
        data = with_qlora.Data(64, "", 256).parts[1]
        losses = [with_qlora.evaluate(model, data, settings["training"], here.device) for _ in range(3)]
        return losses, before, {module.training for module in model.modules()}


def test_a_base_with_dropout_is_evaluated_without():
    """In attention, which drops out by a number, and beside the adapters, where a module does."""
    settings = SMALL_LORA | {
        "model": SMALL_LORA["model"] | {"attention_dropout": 0.5},
        "lora": SMALL_LORA["lora"] | {"lora_dropout": 0.5},
    }
    (dropping, before, after), (plain, *_) = (
        launch(evaluated_with_dropout, 1, (how,))[0] for how in (settings, SMALL_LORA)
    )
    assert dropping == plain and len({*plain}) == 1
    assert before == after == {True}


def test_ranks_evaluate_equal_parts_of_a_batch():
    """Of three examples two ranks take one each, as one process does that is told to take two."""
    three, two = (SMALL_LORA | {"training": SMALL_LORA["training"] | {"batch_size": size}} for size in (3, 2))
    (losses, *_), *_ = launch(evaluated_with_dropout, 2, (three,))
    (expected, *_), *_ = launch(evaluated_with_dropout, 1, (two,))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_fine_tuned_gets_one_line(tmp_path, base):
    other = SMALL_LORA | {"model": SMALL_LORA["model"] | {"hidden_size": 32}}
    adapters, unknown = str(tmp_path / "adapters"), SMALL_LORA["lora"] | {"target_modules": ["no_such_layer"]}
    with_qlora.make_model(other).save_pretrained(adapters)
    from peft import LoraConfig, get_peft_model

    foreign = str(tmp_path / "foreign")  # fits by its shapes, and none of its names is there
    get_peft_model(nn.ModuleDict({"q_proj": nn.Linear(64, 64)}), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        foreign
    )
    cut = tmp_path / "cut"
    shutil.copytree(base, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:3000])
    cases = [
        (lambda: with_qlora.make_base(SMALL_LORA, str(tmp_path)), "--base .*: no model"),
        (lambda: with_qlora.make_base(SMALL_LORA, str(cut)), "--base .*cut: no model"),
        (lambda: with_qlora.load_adapter(with_qlora.make_base(SMALL_LORA, base), foreign), "adapters of another base"),
        (lambda: with_qlora.make_base(SMALL_LORA, str(tmp_path / "none")), "--base .*none: no model"),
        (lambda: with_qlora.make_model(SMALL_LORA | {"lora": unknown}), "lora: .*no_such_layer"),
        (lambda: with_qlora.make_model(SMALL_LORA | {"model": {"vocab_size": "many"}}), "model: .*vocab_size"),
        (lambda: with_qlora.load_adapter(with_qlora.make_base(SMALL_LORA, base), adapters), "adapters of another base"),
        (lambda: with_qlora.load_adapter(with_qlora.make_base(SMALL_LORA, base), base), "no adapter_config.json"),
        (lambda: with_qlora.Data(64, base, 100), "bytes.* 256 different tokens, and the model knows 100"),
    ]
    for wrong, text in cases:
        with pytest.raises(UserError, match=text) as error:
            wrong()
        assert "\n" not in str(error.value)


def test_a_block_that_the_base_does_not_have_gets_one_line(base):
    wrong = SMALL_LORA | {"fsdp": SMALL_LORA["fsdp"] | {"transformer_cls_names_to_wrap": ["NoSuchBlock"]}}
    assert "UserError: fsdp: " in (said := str(pytest.raises(RankFailed, launch, qlora, 2, (wrong, base)).value))
    assert "NoSuchBlock" in said


def test_the_model_of_7_billion_on_the_meta_device():
    settings = engine_files.qlora(str(ROOT / "configs" / "engines" / "fsdp_qlora.yaml"))
    model = with_qlora.make_model(settings, "meta")
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert base == 6_738_415_616, "parameters of Llama 2 7B"
    found = with_qlora.bytes_by_part(model)
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert found["base, 4 bits"] == linear // 2
    assert found["scales of the 4-bit blocks"] / linear * 8 == pytest.approx(0.127, abs=0.001)  # Dettmers et al. 2023
    assert found["adapters"] == 4 * 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))


def test_the_stored_measurement_has_every_engine():
    stored = json.loads((ROOT / "06_fsdp" / "engines.json").read_text())
    assert {(row["strategy"], row["engine"]) for row in stored["steps"]} >= set(ENGINES)
    assert all(row["largest difference of a loss"] < 1e-3 for row in stored["steps"])
