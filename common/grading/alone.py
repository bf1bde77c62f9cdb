"""A process that is alone on the machine, as far as Linux can make it: with namespaces of its own (namespaces(7)).

It sees no process but its own children, has no network (nor a Unix socket that another one opened), no terminal, no
shared memory and no files that another one writes. What it writes lies in memory, in the folder that it is told, and is
gone with it; what lies beside that folder is read-only.

    python common/grading/alone.py FOLDER     ends with 0 where this machine lets a process be alone
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "ipc": 0x08000000, "net": 0x40000000, "uts": 0x04000000,
              "cgroup": 0x02000000, "pid": 0x20000000}  # fmt: skip
PDEATHSIG, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38  # of prctl(2)
SAFE, READ_ONLY = 2 | 4, 1 | 32 | 4096  # of mount(2): nosuid and nodev; a mount that is there, read-only
NOT_ALONE = 71  # exit code


def ends_with_its_parent() -> None:
    LIBC.prctl(PDEATHSIG, signal.SIGKILL)


def alone(folder: str, room: int, run: Callable[[], None]) -> None:
    """Run a function in a process that is alone, and end as that ends. It may write up to `room` bytes, into `folder`
    and as much into /dev/shm. For a process that was forked for this, since it doesn't return."""
    try:
        user, group = os.getuid(), os.getgid()
        _call("unshare", sum(NAMESPACES.values()))
        for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        os._exit(NOT_ALONE)
    ended, ends = os.pipe()
    first = os.fork()  # the first of its namespace, which no signal from within ends, and with which all in it end
    if first == 0:
        os.close(ended)  # or what is alone could take from it what is written for this process
        _first(folder, room, run, ends)
    os.close(ends)
    ended_by = os.read(ended, 1)  # the signal that has ended it, if one has
    os.waitpid(first, 0)
    code = os.read(ended, 1) or bytes([NOT_ALONE])
    if ended_by and ended_by[0]:
        signal.signal(ended_by[0], signal.SIG_DFL) if ended_by[0] not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), ended_by[0])
    os._exit(code[0])


def _first(folder: str, room: int, run: Callable[[], None], ends: int) -> None:
    try:
        ends_with_its_parent()
        for place, size in ((folder, room), ("/dev/shm", room), ("/proc", 4096), ("/dev/pts", 4096)):
            _call("mount", b"tmpfs", place.encode(), b"tmpfs", SAFE, f"size={size},mode=755".encode())
        _call("mount", None, os.path.dirname(folder).encode(), None, SAFE | READ_ONLY, None)
        os.chdir(folder)
        nothing = (ctypes.c_uint32 * 6)()  # of what is effective, permitted and inherited
        _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), nothing)
        _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        LIBC.prctl(DUMPABLE, 0)  # its children cannot look into it
        own = os.fork()
    except OSError:
        os._exit(NOT_ALONE)
    if own == 0:
        os.close(ends)
        os.setpgid(0, 0)
        ends_with_its_parent()
        run()
        os._exit(0)
    for descriptor in range(3, 4096):
        if descriptor != ends:
            with contextlib.suppress(OSError):
                os.close(descriptor)  # the pipes are its child's alone: who reads them hears when that ends
    while True:
        pid, status = os.wait()
        if pid == own:
            by, code = (os.WTERMSIG(status), 0) if os.WIFSIGNALED(status) else (0, os.WEXITSTATUS(status))
            os.write(ends, bytes([by, code]))
            os._exit(0)


def _call(name: str, *arguments) -> None:
    if getattr(LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    alone(sys.argv[1], 4096, lambda: None)
