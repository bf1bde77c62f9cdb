"""The process that runs a submission, and what it sends back: walls, limits, reasons, and plain data alone."""

import contextlib
import ctypes
import io
import os
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest
import torch

from common.grading import sandbox
from common.grading.engine import CallOutcome, DoesNotLoad
from common.grading.values import Description
from common.lab.launch import ready_to_fork
from common.lab.ledger import LedgerEntry

WALLS = """
import os, socket
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
room = lambda folder: os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize // 2**20
print("variables", sorted(os.environ))
print("network", [name for _, name in socket.if_nameindex()])
print("capabilities", int(status["CapEff"], 16), int(status["CapBnd"], 16))
print("others' processes", sum(name.isdigit() for name in os.listdir("/proc")) > 4)
print("a session of its own", os.getsid(0) > 0)
print("MiB for files", room(os.getcwd()), room("/dev/shm"))
print("folder", os.getcwd())
print("others' files", os.path.exists(HERE))
"""


@pytest.mark.skipif(bool(sandbox.available()), reason=f"no sandbox: {sandbox.available()}")
def test_the_walls_of_the_sandbox(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "of the one who grades")
    command = [*sandbox._bwrap(), sys.executable, "-S", "-c", WALLS.replace("HERE", repr(str(tmp_path)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "variables ['LC_CTYPE', 'PWD']",
        "network ['lo']",
        "capabilities 0 0",
        "others' processes False",
        "a session of its own True",
        "MiB for files 256 256",
        f"folder {sandbox.TEMPORARY}",
        "others' files False",
    ], f"what a submission finds around it {done.stderr}"
    assert "--die-with-parent" in command[:4], "the sandbox ends with the process that judges"


def test_what_is_hidden_and_what_is_seen_in_the_sandbox(tmp_path, monkeypatch):
    """The home folder and a class's folder look empty, but for Python and the course in them; in the course, the
    answers, the history and a class's folder do."""
    home, python, folder = tmp_path / "mine", tmp_path / "python", tmp_path / "copy"
    course, others, own = home / "course", tmp_path / "class", home / "course" / "class"
    for path in (course / "01_x" / "classroom", own, others, python, folder):
        path.mkdir(parents=True)
    (course / ".git").write_text("gitdir: elsewhere")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sandbox, "ROOT", course)
    monkeypatch.setattr(sandbox, "sys", SimpleNamespace(base_prefix=python, prefix=home / "env", path=[]))
    command = sandbox._bwrap(folder, (others, own, tmp_path / "nowhere"))
    shown = {
        home / "letter": None, others / "jane.py": None, own / "jane.py": None, course / ".git" / "HEAD": None,
        course / ".git": None, course / "01_x" / "classroom" / "solutions.py": None,
        course / "01_x" / "by_hand.py": course, python / "bin": python, home / "env" / "lib": home / "env",
        sandbox.INSIDE / "exercises.py": folder, Path("/usr/bin/env"): Path("/"),
    }  # fmt: skip
    for path, source in shown.items():
        assert source_of(command, path) == source, f"{path}: from which folder it is, None: empty"


def source_of(command: list[str], path: Path) -> Path | None:
    """What a path in the sandbox shows: of the mounts that bubblewrap makes one after the other, the last above it."""
    found, words = None, iter(command)
    for word in words:
        if word in ("--ro-bind", "--bind", "--tmpfs"):
            source = Path(next(words)) if "bind" in word else None
            place = Path(next(words))
            if place == path or place in path.parents:
                found = None if source == Path("/dev/null") else source
    return found


ENDS = {
    "import os; os.read(0, 1); os.write(1, (2**28 + 1).to_bytes(8, 'little'))": "the answer was too long",
    "import sys; print('first', file=sys.stderr); sys.exit('last ' + 'x' * 300)":
        "grading ended with exit code 1: last " + "x" * 195,
    "import os; os._exit(4)": "grading ended with exit code 4",
    "import time; time.sleep(60)": "not finished after 0.4 s",
    "import os, time; os.write(1, b'half'); os.close(1); time.sleep(0.05)": "grading ended with exit code 0",
}  # fmt: skip


@pytest.mark.parametrize(("code", "why"), ENDS.items())
def test_why_grading_ended(code, why, tmp_path):
    runner = sandbox.Runner(tmp_path, 0.4 if "sleep(60)" in code else 60.0)
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with tempfile.TemporaryFile() as runner.errors:
        runner.process = subprocess.Popen([sys.executable, "-S", "-c", code], stderr=runner.errors, **pipes)
        runner.requests, runner.answers = runner.process.stdin, runner.process.stdout
        with pytest.raises(sandbox.GradingEnded) as ended:
            runner(tmp_path / "ann.py", {}, 2)
        runner.process.kill()
        runner.process.wait()
        runner.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what nobody has read any more
            runner.process.stdin.close()
    assert str(ended.value) == why, "the reason in a class's table"


def test_a_request_that_nobody_reads_ends_this_grading_alone(tmp_path, monkeypatch):
    """As where a submission ends its process after an answer: the class goes on."""
    popen, seen = subprocess.Popen, []
    monkeypatch.setattr(sandbox, "available", lambda: "a test")
    monkeypatch.setattr(subprocess, "Popen", lambda command, **about: seen.append(about) or popen(["true"], **about))
    with pytest.raises(sandbox.GradingEnded, match="^grading ended with exit code 0$"):
        with sandbox.Runner(tmp_path, 60.0) as runner:
            assert [about["cwd"] for about in seen] == [runner.empty.name], "a submission runs in an empty folder"
            told = dict.fromkeys(("HOME", "TMPDIR"), runner.empty.name) | {sandbox.MARK: runner.mark}
            told |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(sandbox.ROOT)}
            assert {name: seen[0]["env"][name] for name in told} == told, "the environment of a submission"
            assert seen[0]["start_new_session"], "all of its processes can be ended at once"
            assert runner.mark != sandbox.Runner(tmp_path, 60.0).mark, "a mark of its own"
            runner.process.wait()
            runner(tmp_path / "ann.py", {}, 2)
    assert runner.process.stdin.closed and runner.errors.closed and not Path(runner.empty.name).exists()


def sent(answer) -> bytes:
    data = io.BytesIO()
    torch.save(answer, data)
    return data.getvalue()


def test_outcomes_come_back_as_they_were():
    entries = [LedgerEntry("send", 8, 2, torch.float32, 1, (0, 1)), LedgerEntry("all_reduce", 16, 4)]
    value = [torch.tensor([1.0, 2.0]), [3, 2.5, True, None, "text"], Description("dict {}")]
    full = CallOutcome("returned", value, entries, True, "why", "printed\n")
    outcomes = [[full, CallOutcome("waited", text="waiting in recv")], [CallOutcome("not attempted")]]
    back = sandbox._unpacked(sent(("answer", {0: sandbox._packed(outcomes), 1: "it died"})), {0: None, 1: None})
    assert back[1] == "it died", "the text of a failure"
    first = back[0][0][0]
    assert first.value[0].tolist() == [1.0, 2.0] and first.value[1:] == value[1:], "what was returned"
    assert [type(item) for item in first.value[1:]] == [list, Description], "what cannot be compared is a description"
    assert first.entries == entries and first.entries[0].group == (0, 1), "what was sent"
    assert (first.status, first.changed_input, first.text, first.printed) == ("returned", True, "why", "printed\n")
    assert back[0][0][1:] + back[0][1] == [outcomes[0][1], outcomes[1][0]], "the outcomes of every call and rank"


def test_an_answer_of_other_data_is_refused():
    with pytest.raises(DoesNotLoad, match="^SyntaxError: why$"):
        sandbox._unpacked(sent(("does not load", "SyntaxError: why")), {})
    for value in (["is", {"a": 1}], ["is", torch.nn.Parameter(torch.ones(1))], ["list", [["is", (1,)]]]):
        rank = [["returned", value, [], False, "", ""]]
        with pytest.raises(sandbox.GradingEnded, match=r"^what came back is no answer \(TypeError\)$"):
            sandbox._unpacked(sent(("answer", {0: [rank]})), {0: None})
    with pytest.raises(sandbox.GradingEnded, match=r"^what came back is no answer \(KeyError\)$"):
        sandbox._unpacked(sent(("answer", {})), {0: None})


def run_jobs(file, jobs, size) -> dict:
    if file == "bad":
        raise DoesNotLoad("SyntaxError: why")
    limits = [resource.getrlimit(limit) for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)]
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in (0, 1)]
    return {0: f"{file} {jobs} {size} {limits} {files} {ctypes.CDLL(None).prctl(3)}"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
def test_requests_are_answered_one_after_the_other_within_limits(monkeypatch):
    """A submission may write files of 256 MiB, leaves no core, has neither requests nor answers on 0 and 1, and its
    process cannot be looked into by way of /proc."""
    monkeypatch.setattr(sandbox, "run_jobs", run_jobs)
    requests, answers = os.pipe(), os.pipe()
    with ready_to_fork():
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(requests[0], 0)
                os.dup2(answers[1], 1)
                for descriptor in (*requests, *answers):
                    os.close(descriptor)
                sandbox.serve()
            finally:
                os._exit(0)
    os.close(requests[0])
    os.close(answers[1])
    with open(requests[1], "wb") as ask, open(answers[0], "rb") as hear:
        said = []
        for request in (("good", {7: "a job"}, 3), ("bad", {}, 2)):
            data = cloudpickle.dumps(request)
            ask.write(struct.pack("<Q", len(data)) + data)
            ask.flush()
            (length,) = struct.unpack("<Q", hear.read(8))
            said.append(torch.load(io.BytesIO(hear.read(length)), weights_only=True))
    os.waitpid(pid, 0)
    limits, files = [(2**28, 2**28), (0, 0)], ["/dev/null", "/dev/null"]
    text = f"good {{7: 'a job'}} 3 {limits} {files} 0"
    assert said == [("answer", {0: text}), ("does not load", "SyntaxError: why")], "two answers to two requests"


def test_processes_of_a_submission_are_known_by_their_mark(tmp_path):
    def child(mark: str) -> subprocess.Popen:
        return subprocess.Popen(["sleep", "60"], env=os.environ | {sandbox.MARK: mark}, start_new_session=True)

    mark = str(tmp_path)
    mine, another = child(mark), child("another")
    found = [process.pid for process in sandbox._marked(mark)]
    for process in (mine, another):
        process.kill()
        process.wait()
    assert found == [mine.pid], "processes with this mark"


def test_all_processes_of_a_submission_share_its_memory(tmp_path, monkeypatch):
    used = SimpleNamespace(rss=3 * 2**30, shared=2**29)
    family = [SimpleNamespace(memory_info=lambda: used)] * 2
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(children=lambda recursive: family * recursive))
    runner = sandbox.Runner(tmp_path, 60.0)
    runner.process = SimpleNamespace(pid=1)
    runner._look()  # 5 GiB
    family.append(family[0])
    with pytest.raises(sandbox.GradingEnded, match="^ended at 7.5 GiB of memory; 6 are allowed$"):
        runner._look()
    family[:] = [SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0, shared=0))] * 65
    with pytest.raises(sandbox.GradingEnded, match="^ended at 65 processes; 64 are allowed$"):
        runner._look()


def test_why_there_is_no_sandbox(monkeypatch):
    available = sandbox.available.__wrapped__  # which does not remember
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sandbox, "_bwrap", lambda: ["sh", "-c", "echo 'no  permission' >&2; exit 1"])
    assert available() == "bubblewrap does not work here (no permission)"
    monkeypatch.setattr(sandbox, "_bwrap", lambda: [])
    assert available() is None, "it works"
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert available() == "bubblewrap (bwrap) is not installed"


def test_folders_of_python_are_seen():
    assert all(path.is_dir() for path in sandbox._python_paths())
    assert {Path(path) for path in sys.path if path.endswith("site-packages")} <= {*sandbox._python_paths(), Path()}
