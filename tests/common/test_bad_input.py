"""Bad input gets one line that names what is wrong, the value with it, and exit code 2, before anything is started.

A row is a command line, the ranks that are started (@N, else 1), and words that the line must have: the option, the
value, and what would be right where that can be known. How the sentence goes is nobody's business here. Where the
border is of what a strategy can divide, test_chapter_messages.py says.
"""

import errno
import os
from pathlib import Path

import pytest
import torch
from forks import Fork
from helpers import FULL, begun, configure, refused

from common import ROOT, check, generate, runs
from common.own import load_weights, named
from common.questions import tally

pytestmark = pytest.mark.usefixtures("no_launcher")

SCRIPTS = """
--distributed => --distributed --nproc_per_node 2
--strategy dpp => dpp dp single
--strategy DDP => DDP mean 'ddp'
--width 100 --heads 3 => --width 100 --heads 3
--by-hand --strategy single => single
--strategy ddp --implementation magic => ddp magic pytorch by-hand
--strategy ddp --by-hand --implementation pytorch => --by-hand --implementation pytorch
--strategy context => context --by-hand
--strategy hsdp => --mesh data=2 shard 1
--strategy hsdp --mesh 2by2 => --mesh 2by2 data=2,tensor=2
--strategy hsdp --mesh 0x1 => --mesh 0x1 data=0,shard=1
--loading stream => --loading ddp single
--strategy ddp --loading shards => --loading shards shard-stream
--strategy ddp --loading shard-stream --task images => --loading shard
--strategy ddp --mesh 1x1 => --mesh 1x1 data=2,tensor=2
--accumulate 3 => --accumulate --accumulation-steps
--mesh data=1,tenor=1 => --mesh data=1,tenor=1 tenor tensor
--mesh data=1,data=1 => --mesh data=1,data=1
--mesh data=two => --mesh data=two data=2
--mesh data=2 => --mesh data=2 2 1
--mesh-order data,rows => --mesh-order data,rows pipeline
--mesh-order tensor => --mesh-order tensor data
--mesh-order data,data => --mesh-order data,data
--strategy ddp --replicas 2 => --replicas --mesh data=2
--strategy fsdp --mesh data=1,shard=1 => fsdp shard data --by-hand
--strategy ddp --by-hand --mesh tensor=1 => ddp tensor data
--strategy fsdp --offload --width 65536 => --offload GiB
--recompute full --strategy tensor => --recompute tensor
--schedule gpipe => --schedule single
--find-batch-size => --find-batch-size single
--strategy fsdp --by-hand --find-batch-size => --find-batch-size fsdp
--strategy sequence => sequence --by-hand
--strategy pipeline --schedule zigzag => --schedule zigzag
--strategy pipeline --microbatches 5 => --microbatches pipeline 5 30
--strategy pipeline --microbatches 0 => --microbatches 0 1
--strategy pipeline --stages-per-rank -1 => --stages-per-rank -1 0
--strategy pipeline --schedule interleaved --stages-per-rank 9 => 9 6 --layers 7
--strategy pipeline+ddp => --mesh data=2 pipeline
--device tpu => --device tpu cpu cuda
--steps many => --steps many --help
--steps 0 => --steps 0 1
--layers 0 => --layers 0 1
--batch-size -4 => --batch-size -4 1
--accumulation-steps 0 => --accumulation-steps 0 1
--seed -1 => --seed -1
--sample 100000000 => --sample 100000000 100000
--text= => --text empty
--run-dir= => --run-dir empty
--layers 100000 => --layers 100000 10000
--debug-server 65536 => --debug-server 65536 65535
--width 4000000000 => --width 4000000000 1000000
--seed 2147483648 => --seed 2147483648 2147483647
--timeout 0 => --timeout 0
--lr inf => --lr inf
--timeout inf => --timeout inf
--lr 0 => --lr 0
--lr nan => --lr nan
--max-norm 0 => --max-norm 0 inf
--max-norm nan => --max-norm nan
--beta1 1 => --beta1 1
--optimizer sgd --beta1 0.8 => --beta1 --optimizer adamw
--optimizer sgd --beta2 0.9 => --beta2 --optimizer adamw
--beta2 1 => --beta2 1
--weight-decay -1 => --weight-decay -1
--weight-decay nan => --weight-decay nan
--optimizer sgd --weight-decay 0.2 => --weight-decay --optimizer adamw
--warmup-steps -1 => --warmup-steps -1
--lr-schedule linear => --lr-schedule linear cosine
--sample 9 --task images => --sample --task text
--text poems --task images => --text --task text
--task images --data-dir x => --data-dir --dataset digits
--dataset cifar10 => --dataset cifar10 --task images
--data-dir mytext => --data-dir --text
--task images --download => --download --dataset digits
--async-checkpoint --checkpoint-every 0 => --async-checkpoint --checkpoint-every
--keep-best => --keep-best --validate-every
--validate-batch-size 8 => --validate-batch-size --validate-every
--keep-best --validate-every 3 --checkpoint-every 2 => --keep-best --validate-every 3 --checkpoint-every 2
--stride 3 => --stride --help
--batch-sise 3 => --batch-sise --batch-size
--confg x.yaml => --confg --config
--strategy pipeline --schedul gpipe => --schedul --schedule
ddp => ddp
--resume => --resume runs/ --run-dir
--resume --run-dir nowhere => --resume nowhere
--resume 3 --run-dir nowhere => --resume nowhere
--resume . => manifest.json
--backend nccl => --backend nccl
--device cuda => --device cuda
--run-dir /proc/nowhere => --run-dir /proc/nowhere
--strategy mesh --mesh expert=1 => --mesh expert=1 pipeline,
--strategy hsdp --mesh 1x2 @4 => --mesh 1x2 data=1,shard=2
--dry-run --mesh data=99999999 => --mesh data=99999999 1000000
--strategy pipeline --schedule zbv --recompute full --layers 2 => --recompute full --schedule zbv 1f1b --by-hand
--strategy pipeline --microbatches 99999999999 => --batch-size --microbatches 99999999999
--dry-run --mesh data=2 @4 => --mesh data=2 2 4
--offload=yes => --offload single
--strategy context --implementation magic => context --by-hand
"""
YAML = {
    "batch_sise: 3": "batch_sise batch-size",
    "Accumulation_Steps: 3": "Accumulation_Steps accumulation-steps",
    "lay-ers: 3": "lay-ers layers",
    "replicas: 2": "replicas data=2",
    "learning-rate: 3": "learning-rate lr",
    "schedule: gpipe": "--schedule pipeline single",
    "steps: true": "steps True",
    "steps: 2.5": "steps 2.5",
    "steps: .inf": "steps inf",
    "lr: fast": "lr fast",
    "distributed: 1": "distributed 1",
    "steps:": "steps None",
    "text: [a, b]": "text ['a',",
    "text:": "text None",
    r'run-dir: "a\0b"': "run-dir a\\x00b",
    "optimizer: adam": "optimizer adam sgd",
    "model: 3": "model --help",
    "- steps": "batch-size: 32",
    "steps: [": "YAML",
    "3: 4": "3 batch-size",
    "~: 4": "None batch-size",
    "[" * 5000: "YAML",
}
CHECKER = """
09 => '09' 01_intro
05_nowhere => 05_nowhere 01_intro
07_nowhere => 07_nowhere 01_intro
01_intro nothing => nothing 01_intro ring_shift
01_intro ring_shfit => ring_shfit ring_shift
01_into ring_shift => 01_into 01_intro
ring_shitf => ring_shitf ring_shift 01_intro
data_paralel => data_paralel 02_data_parallel
01_intro ring => ring 01_intro
01_intro --hint => --hint
global_mean --hint 3 => --hint 3 global_mean 2
global_mean --hint 0 => --hint 0 global_mean 2
03_ddp ring_shift --hint => ring_shift 03_ddp
--csv --submission 01_intro 01_intro ring_shift => exercise
--pages x => --pages --csv
--export x => --export --csv
--submission 01_intro --csv --time-limit 0 => --time-limit 0
--submission 01_intro --csv --time-limit nan => --time-limit nan
--csv => --submission
--submission nowhere.py --csv => nowhere.py
--submission 01_intro => --csv
--submission 01_intro --csv --watch => --watch
--unknown => --unknown
"""


def rows(table: str) -> list[tuple[str, str]]:
    return [tuple(row.split(" => ")) for row in table.strip().splitlines()]


@pytest.mark.parametrize("line, words", rows(SCRIPTS))
def test_of_the_scripts(line, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line, _, ranks = line.partition(" @")
    with refused(*words.split()):
        configure(line, int(ranks or 1))
    assert list(tmp_path.iterdir()) == [], "something was made for a run that cannot be"


@pytest.mark.parametrize("text, words", YAML.items())
def test_of_a_file_of_options(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    with refused("run.yaml", *words.split()):
        configure("--config run.yaml")


# A place that cannot be, for each option and argument that names one.
WRONG = {
    "too long": "x" * 300,
    "below a file": "file/x",
    "a loop": "loop/x",
    "leads nowhere": "link",
    "not ours": "closed",
}
NAMED = {
    **{f"{option} PLACE": lambda line: configure(line) for option in ("--resume", "--resume --run-dir", "--config")},
    **{f"--{option} PLACE": lambda line: configure(line) for option in ("run-dir", "text", "strategy ddp --resume")},
    **{f"--task PLACE.py{name}": lambda line: configure(line) for name in ("", ":other")},
    **{f"{command} PLACE": lambda line: runs.main(line.split()) for command in ("summary", "ranks", "plot", "export")},
    **{f"{command} run --out PLACE/a.png": lambda line: runs.main(line.split()) for command in ("plot", "export")},
    "compare run PLACE": lambda line: runs.main(line.split()),
    "PLACE --length 3": lambda line: generate.main(line.split()),
    "--submission PLACE": lambda line: check.main(line.split()),
    **{
        f"--csv --unprotected --submission file --{option} PLACE": lambda line: check.main(line.split())
        for option in ("pages", "export")
    },
    "questions PLACE": lambda line: tally([Path(line.split()[1])]),
    "PLACE": lambda line: load_weights(torch.nn.Linear(1, 1), line),
    "PLACE.py:model": lambda line: named(line),
}


@pytest.mark.parametrize("place", WRONG)
def test_of_places(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch(), Path("loop").symlink_to("loop"), Path("link").symlink_to("nowhere")
    run = begun(Path("run"), strategy="single")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "grad_norm": 1.0, "step_seconds": 1.0}\n')
    for function in ("stat", "open", "mkdir", "scandir", "listdir", "lstat"):  # whoever is root may look everywhere
        call = getattr(os, function)

        def closed(path, *more, call=call, **how):
            if str(path).startswith("closed"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(path, *more, **how)

        monkeypatch.setattr(os, function, closed)
    before = sorted(tmp_path.rglob("*"))
    for line, read in NAMED.items():
        with refused(WRONG[place].split("/")[0]):
            read(line.replace("PLACE", WRONG[place]))
    assert sorted(tmp_path.rglob("*")) == before


def test_of_a_file_that_is_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with refused("run.yaml", "YAML"):
        configure(f"--config {tmp_path / 'run.yaml'}")


@pytest.mark.parametrize("line, words", rows(CHECKER))
def test_of_the_checker(line, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    with refused(*words.split()):
        check.main(line.split())


PLACES = "tools/*.py", "docs/*.py", "0*/fastest.py", "0*/speed.py", "planner/decision*.py"
EVERY = sorted(file for place in PLACES for file in ROOT.glob(place) if '__name__ == "__main__"' in file.read_text())
WRITERS = [ROOT / "tools" / f"{name}.py" for name in ("bench_loading", "facts")]  # of what is committed


@pytest.mark.parametrize("program", EVERY if FULL else WRITERS, ids=lambda file: file.stem)
def test_of_programs_with_few_options(program, tmp_path):
    process = Fork(program, "--unknown-option", cwd=tmp_path)
    written, errors = process.communicate(timeout=120)
    assert (process.returncode, written, len(errors.splitlines())) == (2, "", 1), errors
