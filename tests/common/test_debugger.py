"""Breakpoints as editors set them: a client of the debug adapter protocol, which debugpy speaks, as VS Code and
JupyterLab are. A place is a file under the name that the reader has open, and a line."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers import LAUNCHER, SMALL, as_options, first_line_of

from common import ROOT
from common.lab.launch import free_port

pytest.importorskip("debugpy")  # comes with ipykernel


NET = 600  # seconds, far above the ten that it takes: only what hangs meets it


class Session:
    """A connection for one process. Messages of all sessions come into one queue, as (session, message)."""

    def __init__(self, port: int, inbox: queue.Queue, attach: dict, places: list[tuple[Path, int]]):
        self.inbox, self.attach, self.places, self.number = inbox, attach, places, 0
        deadline = time.monotonic() + NET
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", port), timeout=NET)
                break
            except OSError:
                assert time.monotonic() < deadline, "no debugger listens"
                time.sleep(0.1)
        threading.Thread(target=self.read, daemon=True).start()
        self.ask("initialize", adapterID="python", pathFormat="path", supportsStartDebuggingRequest=False)

    def ask(self, command: str, **arguments) -> int:
        self.number += 1
        body = json.dumps({"seq": self.number, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self.number

    def read(self) -> None:
        file = self.socket.makefile("rb")
        try:
            while header := file.readline():
                length = int(header.split(b":")[1])
                file.readline()
                self.inbox.put((self, json.loads(file.read(length))))
        except (OSError, ValueError):
            pass  # the process has ended

    def follow(self, message: dict) -> None:
        """What a client answers to what it is told at the beginning."""
        if message.get("command") == "initialize":
            self.ask("attach", **self.attach)
        elif message.get("event") == "initialized":
            for path in {path for path, _ in self.places}:
                lines = [{"line": line} for place, line in self.places if place == path]
                self.ask("setBreakpoints", source={"path": str(path)}, breakpoints=lines)
            self.ask("configurationDone")
        elif message.get("event") == "stopped":
            self.ask("stackTrace", threadId=message["body"]["threadId"])


MARK = "DEBUGGED_AT"  # in the environment of all that a test has started


def stops(arguments: list, places: list[tuple[Path, int]], processes: int) -> list[tuple]:
    """Debug `python ARGUMENTS` until so many processes have stopped: the (file, line) where each is, in any order."""
    port, inbox, found = free_port(), queue.Queue(), {}
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1", MARK: str(port)}
    command = [sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client", *arguments]
    attach = {"name": "test", "type": "python", "request": "attach", "subProcess": True, "justMyCode": False}
    attach |= {"connect": {"host": "127.0.0.1", "port": port}}
    errors = tempfile.TemporaryFile("w+")  # a pipe would be held open by the ranks, whoever else has ended
    done = subprocess.Popen([*map(str, command)], env=environment, start_new_session=True, stderr=errors)
    try:
        Session(port, inbox, attach, places)
        deadline = time.monotonic() + NET
        while len(found) < processes and time.monotonic() < deadline:
            try:
                session, message = inbox.get(timeout=1)
            except queue.Empty:
                if done.poll() is None:
                    continue
                break  # the program has ended, past the places
            session.follow(message)
            if message.get("event") == "debugpyAttach":  # a process that the program has started
                Session(message["body"]["connect"]["port"], inbox, message["body"], places)
            elif message.get("command") == "stackTrace":
                frame = message["body"]["stackFrames"][0]
                found[id(session)] = Path(frame["source"]["path"]), frame["line"]
    finally:
        os.killpg(done.pid, 9)
        done.wait()
        for process in psutil.process_iter():  # the adapter and torchrun's ranks have left that group
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(port):
                    process.kill()
    errors.seek(0)
    assert len(found) >= processes, f"{len(found)} of {processes} processes have stopped: {errors.read()[-2000:]}"
    return list(found.values())


SCRIPT = ROOT / "03_ddp" / "distributed_training.py"
OPTIONS = as_options(SMALL | {"steps": 1})


def test_an_editors_breakpoint_is_hit_in_the_program_in_every_rank_of_torchrun(tmp_path):
    place = SCRIPT, first_line_of(SCRIPT, "main")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, SCRIPT, "--distributed", *OPTIONS, f"--run-dir={tmp_path / 'run'}"]
    assert stops(command, [place], 2) == [place] * 2


@pytest.mark.weekly  # files have their one name in forked ranks as well: test_imports.py
def test_an_editors_breakpoint_is_hit_in_ranks_that_a_notebook_starts(tmp_path):
    """They are forked. A notebook's own debugger, in JupyterLab, follows no other process: an editor's does."""
    place = ROOT / "03_ddp" / "by_hand.py", first_line_of(ROOT / "03_ddp" / "by_hand.py", "assign")
    program = tmp_path / "page.py"
    program.write_text("""import torch
from common.lab.launch import launch
from course.ddp.by_hand import assign

def ranks():
    return assign([torch.zeros(3)], 4)

launch(ranks, 2)
""")
    assert stops([program], [place], 2) == [place] * 2
