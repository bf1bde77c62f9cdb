"""A run that somebody else has written, damaged at random: whoever reads it ends as if nothing were wrong or with one
line that names the file, soon, and nothing outside of the run's folder is written. The damages are others in every run
of the weekly job (DAMAGES says how many of each kind of file), and a few, always the same, in `make test`."""

import contextlib
import functools
import io
import json
import os
import pickle
import re
import shutil
import signal
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from helpers import SMALL, NoFigure, configure, refused, train
from hypothesis import Phase, given, settings
from hypothesis import strategies as some
from other_tools import MEGATRON, NANOTRON, QWEN

from common import ROOT, check, checkpoint, engine_files, manifest, run_dir, runs
from common.errors import UserError
from common.grading import classes
from common.lab.launch import RankFailed, launch
from common.mesh import make_mesh
from common.ranks import process_group
from common.task import make_task
from planner import models, read_config
from planner.__main__ import main as explain
from planner.constants import STORED, load
from planner.emit import emit
from planner.estimate import estimate
from planner.hardware import cluster, read_here
from planner.layout import make_layout

pytestmark = pytest.mark.usefixtures("no_launcher")

MANY = int(os.environ.get("DAMAGES", 0))
damaged = settings(max_examples=MANY or 17, derandomize=not MANY, phases=[Phase.generate])
STEP = "checkpoint-000001"
FILES = ("config.json", "metrics.jsonl", f"{STEP}/manifest.json", f"{STEP}/__0_0.distcp")
ODD = some.sampled_from([
    None, True, -1, 0, 10**14, 10**400, 1.5, float("inf"), "", "x", "\0", "../x", "/etc/hostname", "\x1b[2J", [], {},
    [1], {"x": 5}, "é\ud800", "x" * 3000, [[[[]]]],
])  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_dir, "loss_curve", lambda records: NoFigure())
        config = configure(**SMALL, steps=1, strategy="single", run_dir=folder)
        config.main(config)  # in this process: nothing is started for it
    return folder


@contextlib.contextmanager
def soon():
    """Ends what has no end: nets far above a reader's tenth of a second of processor time, on whatever machine."""

    def late(*_):
        raise AssertionError("no end in sight")

    before = {kind: signal.signal(kind, late) for kind in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, 30)
    signal.alarm(600)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


def places(content, path=()) -> list[tuple]:
    """The places of JSON, by keys."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def changed(content, data):
    """JSON with something else in one place, or nothing, or under another key."""
    *way, last = path = data.draw(some.sampled_from(places(content))) or (None,)
    if path == (None,):
        return data.draw(ODD)
    inside = content
    for key in way:
        inside = inside[key]
    kind = data.draw(some.sampled_from(["other", "none", "key"]))
    value = inside.pop(last) if kind != "other" else None
    if kind == "key" and isinstance(inside, dict):
        inside[data.draw(some.sampled_from(["", "\0", "../x", "/etc/hostname", "\x1b[2J", "x" * 300]))] = value
    if kind == "other":
        inside[last] = data.draw(ODD)
    return content


def changed_line(text: str, data) -> str:
    """YAML, TOML or a script with something else as the value in one line, or without that line."""
    lines = text.splitlines()
    at = data.draw(some.integers(0, len(lines) - 1))
    found = re.match(r"\s*[\w\"'-]+ *[:= ]", lines[at])
    other = json.dumps(data.draw(ODD))
    lines[at] = f"{found[0]} {other}" if found and data.draw(some.booleans()) else other * data.draw(some.booleans())
    return "\n".join(lines)


def damage(file: Path, data, victim: Path) -> None:
    """Put something else into a file, or something else in its place."""
    content = file.read_bytes()
    kinds = ["bits", "cut", "insert", "fifo", "device", "link", "folder", "huge", "gone"]
    kinds += ["json"] * 9 * (".json" in file.suffix) + ["line"] * 9 * (file.suffix in (".yaml", ".toml", ".sh"))
    kind = data.draw(some.sampled_from(kinds))
    at = data.draw(some.integers(0, len(content) - 1))
    if kind == "json":
        lines = file.suffix == ".jsonl"
        found = [json.loads(line) for line in content.splitlines()] if lines else json.loads(content)
        found = changed(found, data)
        with contextlib.suppress(TypeError, KeyError):  # what is left has a checksum of its own: a person can do that
            if file.name == manifest.MANIFEST:
                parts = {key: found[key] for key in ("about", "files", "tensors")}
                found |= {"checksum": f"{zlib.crc32(json.dumps(parts).encode()):08x}"}
        text = "\n".join(map(json.dumps, found)) if lines and isinstance(found, list) else json.dumps(found, indent=1)
        file.write_text(text + "\n")
    elif kind == "line":
        file.write_text(changed_line(content.decode(), data), errors="replace")
    elif kind == "bits":
        changed_bytes = bytearray(content)
        changed_bytes[at] ^= data.draw(some.integers(1, 255))
        file.write_bytes(changed_bytes)
    elif kind == "insert":
        file.write_bytes(content[:at] + data.draw(some.sampled_from([b"\0", b"\xff\xfe", b"[" * 5000])) + content[at:])
    elif kind == "cut":
        file.write_bytes(content[:at])
    else:
        file.unlink()
        make = {"fifo": os.mkfifo, "folder": os.mkdir, "gone": lambda path: None, "huge": sparse}
        make |= {"device": lambda path: os.symlink("/dev/zero", path), "link": lambda path: os.symlink(victim, path)}
        make[kind](file)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**40)


def seal(folder: Path) -> None:
    """A manifest with the checksums of the files as they are now: those stop accidents, not people."""
    found = manifest.read(folder)
    if any(Path(folder, name).stat().st_size > 2**30 for name in found.files):
        raise OSError("nobody computes that checksum")
    files = {name: (Path(folder, name).stat().st_size, manifest.checksum(folder / name)) for name in found.files}
    (folder / manifest.MANIFEST).write_text(manifest.seal(found.about, files, found.tensors))


def readers(name: str, run: Path) -> list:
    """What reads a file of a run: `common.runs`, --resume, and what the ranks of a run that goes on do."""
    read = [lambda: runs.main(["summary", str(run)]), lambda: configure(f"--resume --steps 3 --run-dir {run}")]
    if name.startswith(STEP):
        read = [lambda: runs.main(["export", str(run), "--step", "1"]), lambda: configure(f"--resume {run / STEP}")]
        read.append(lambda: take_up(run / STEP))
    return read


def take_up(folder: Path) -> None:
    """Without a look at checksums, which somebody may have made anew."""
    torch.manual_seed(0)
    strategy = config_and_strategy()
    checkpoint.load(folder, strategy)


@functools.cache
def config_and_strategy():
    config = configure(**SMALL, strategy="single", dry_run=True)
    task = make_task(config)
    return config.strategy_class(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes, "cpu")))


def outside(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", FILES)
def test_whatever_is_wrong_with_a_file_is_one_line(name, whole, tmp_path_factory):
    @damaged
    @given(some.data())
    def each(data):
        folder = tmp_path_factory.mktemp("damaged")
        run = Path(shutil.copytree(whole, folder / "run"))
        (folder / "victim").write_text("mine")
        before = outside(folder)
        damage(run / name, data, folder / "victim")
        if name.endswith(".distcp"):
            with contextlib.suppress(UserError, OSError):
                seal(run / STEP)
        for read in readers(name, run):
            with soon():
                try:
                    read()
                except UserError as error:
                    said = str(error)
                    assert "\n" not in said and len(said) < 1000, said
                    assert "weights_only" not in said and "regex" not in said, said
                    assert str(run) in said or said.startswith("--"), said
        assert outside(folder) == before, "written outside of the run"
        shutil.rmtree(folder)

    with process_group("cpu"):
        each()


SETTINGS = {"run.yaml": ROOT / "configs/cosine.yaml", "constants.json": STORED}


@pytest.mark.parametrize("name", SETTINGS)
@damaged
@given(some.data())
def test_settings_and_constants_are_read_or_refused_in_one_line(name, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    file = folder / name
    shutil.copy(SETTINGS[name], file)
    (folder / "victim").write_text("mine")
    damage(file, data, folder / "victim")
    with soon(), contextlib.suppress(UserError):
        if name == "run.yaml":
            configure(f"--config {file} --dry-run --mesh data=1")
        else:
            load.__wrapped__(file)  # the planner's, without what it has kept
            read_here(file)
    shutil.rmtree(folder)


def of_engines(folder: Path) -> list[Path]:
    """A file of each tool that the course or the planner reads, in a folder."""
    found = {file.name: file.read_text() for file in sorted((ROOT / "configs/engines").iterdir())}
    model, nodes = models.find("llama-3-8b"), cluster("h100-80gb", 8, 8)
    layout = make_layout(model, nodes, {"shard": 8}, batch_size=64, sequence=2048, zero_stage=3)
    for tool in ("torchtitan", "deepspeed", "accelerate", "hf-trainer", "torchrun"):
        found |= emit(estimate(model, nodes, layout, max_memory_gib=2000), tool).files
    found |= {"megatron.sh": MEGATRON, "nanotron.yaml": NANOTRON, "config.json": json.dumps(QWEN)}
    for name, text in found.items():
        (folder / name).write_text(text)
    return [folder / name for name in found if Path(name).suffix in (".json", ".yaml", ".toml", ".sh")]


def test_files_of_engines_are_read_or_refused_in_one_line(tmp_path_factory, capsys):
    whole = of_engines(tmp_path_factory.mktemp("engines"))

    @damaged
    @given(some.data())
    def each(data):
        folder = tmp_path_factory.mktemp("damaged")
        file = Path(shutil.copy(data.draw(some.sampled_from(whole)), folder))
        (folder / "victim").write_text("mine")
        damage(file, data, folder / "victim")
        for read in (
            lambda: explain(["explain", str(file), "--gpu=a100", "--gpus=8", "--model=gpt2"]),
            lambda: engine_files.deepspeed(str(file)),
            lambda: engine_files.qlora(str(file)),
        ):
            with soon():
                try:
                    capsys.readouterr()
                    read()
                except (UserError, SystemExit) as error:
                    said = str(error) if isinstance(error, UserError) else capsys.readouterr().err.rstrip("\n")
                    assert said.isprintable() and 10 < len(said) < 1000, said
        shutil.rmtree(folder)

    each()


@pytest.mark.parametrize("text", ["1" + "0" * 400, '"1%s"' % ("0" * 400), "10000000000000000000"])
def test_a_number_of_an_engine_that_no_memory_is_computed_of_is_refused(text, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(QWEN).replace('"hidden_size": ', f'"x": [{text}], "hidden_size": '))
    with refused("c.json", "x.0", "too large"):
        read_config.read(str(tmp_path / "c.json"))


@damaged
@given(some.data())
def test_a_submission_is_copied_or_refused_in_one_line(tmp_path_factory, data):
    """And none is lost, nor a file outside of it read."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "class").mkdir()
    shutil.copy(ROOT / "01_intro/classroom/solutions.py", folder / "class" / "ann.py")
    (folder / "victim").write_text("mine")
    damage(folder / "class" / "ann.py", data, folder / "victim")
    with soon(), contextlib.suppress(UserError):
        for number, one in enumerate(classes.submissions(folder / "class")):
            assert one.name == "ann" or one.problem, "of this file"
            copied = classes.copy(one, folder / str(number))
            assert "\n" not in str(copied) and (isinstance(copied, str) or copied.read_bytes() != b"mine")
        check.chapter_of([classes.beginning(one) for one in classes.submissions(folder / "class")])
    shutil.rmtree(folder)


def test_aliases_that_multiply_are_refused(tmp_path):
    lines = [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9)]
    (tmp_path / "run.yaml").write_text("\n".join(["a0: &a0 [1]", *lines]))
    with soon(), refused("run.yaml", "alias"):
        configure(f"--config {tmp_path / 'run.yaml'}")


def test_code_in_a_checkpoint_is_never_run(whole, tmp_path):
    """Neither in .metadata, which nobody reads, nor in a rank's file."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "called"),)

    folder = Path(shutil.copytree(whole, tmp_path / "run")) / STEP
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    seal(folder)
    assert checkpoint.whole_tensors(folder), "as if it were not there"
    torch.save(Evil(), folder / "__0_0.distcp")
    with refused("__0_0.distcp", "damaged"):
        whole_size = (whole / STEP / "__0_0.distcp").stat().st_size
        with open(folder / "__0_0.distcp", "ab") as file:
            file.truncate(whole_size)
        seal(folder)
        checkpoint.whole_tensors(folder)
    assert not (tmp_path / "called").exists()


def test_a_small_file_that_would_take_much_memory_is_refused():
    """A tensor of zeros, compressed, or one object in two places; as torch.save writes a tensor, it is read."""
    saved, squeezed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(100_000), saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as other:
        for entry in archive.infolist():
            other.writestr(entry.filename, archive.read(entry))
    checkpoint.refuse_bombs(saved, len(saved.getvalue()))
    again = io.BytesIO()
    torch.save([name := "a" * 99, name], again)  # which a pickle has once; of such lists, each may double what there is
    for bomb in (squeezed, again):
        with pytest.raises(ValueError):
            checkpoint.refuse_bombs(bomb, len(saved.getvalue()))


@pytest.mark.parametrize("name", [".config.json.partial", ".lock", "model-000001.pt", "metrics.jsonl", "loss.png"])
def test_nothing_is_written_through_a_link(name, whole, tmp_path):
    """By a run that goes on, or by an export: the link is replaced or refused."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (tmp_path / "victim").write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "victim")
    with contextlib.suppress(UserError, RankFailed):  # RankFailed: the rank's own UserError
        config = configure(f"--resume --steps 2 --run-dir {run}")
        launch(train, 1, ([config],))
    runs.main(["export", str(run), "--step", "1"]) if name.startswith("model") else None
    assert (tmp_path / "victim").read_text() == "mine"
