"""`python` and `torchrun` for the kernels of notebooks, with processes that are forked from one that has imported what
takes long (forks.py): a command in a cell takes three seconds of a processor for each of its processes otherwise, and
most of them for `import torch`.

`serve` puts commands into a folder, which stands first in the PATH of a kernel. They hand their arguments, folder,
environment, stdin, stdout and stderr to it, and end as what was started there has ended.
"""

import contextlib
import functools
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
from pathlib import Path

CLIENT = Path(__file__).with_name("forked_command.py")


def serve(folder: Path) -> None:
    """Start what is asked for, until this process is ended."""
    for name in ("python", "python3", "torchrun"):
        words = [sys.executable, "-SE", str(CLIENT), str(folder / "socket"), sys.executable, name]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    import forks  # noqa: F401  once here, not in each process

    sys.path.remove(str(CLIENT.parent))  # which no program has

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        while True:
            asked, _ = server.accept()
            if os.fork() == 0:
                try:
                    server.close()
                    _start(asked)
                finally:
                    os._exit(1)
            asked.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _start(asked: socket.socket) -> None:
    """In a process of its own: start the program, and end it where the one who has asked for it is gone."""
    from forks import Fork, _torchrun

    data, descriptors, _, _ = socket.recv_fds(asked, 2**20, 3)
    about = json.loads(data)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", buffering=1, closefd=False) for n in range(3))
    name, (first, *more) = about["name"], about["arguments"]
    program, arguments = first, more
    if name == "torchrun":
        program, arguments = _torchrun, about["arguments"]
    elif first in ("-c", "-m"):
        program, arguments = functools.partial(_code if first == "-c" else _module, more[0]), more[1:]
    process = Fork(program, *arguments, cwd=about["cwd"], env=about["env"], files=False)
    while process.poll() is None:
        if select.select([asked], [], [], 0.01)[0]:
            os.killpg(process.pid, signal.SIGKILL)
    asked.send(str(process.returncode).encode())
    os._exit(0)


def _code(text: str, arguments: list[str]) -> None:
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _module(name: str, arguments: list[str]) -> None:
    sys.argv, sys.path[0] = [name, *arguments], os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)
