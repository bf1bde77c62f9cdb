"""One run at a time writes to a run directory."""

import contextlib
import errno
import os
import socket
from pathlib import Path

from common.errors import UserError
from common.stored import printable, to_append

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere


class Lock:
    """Holds a run directory for this process, until `release` or until the process has ended, however it ended.

    The system keeps it (POSIX record locks, which work on network file systems too), so nobody has to find out whether
    the process that left a file is still alive. Forked processes do not inherit it. Raises UserError where another
    process has it. Where the file system has no locks, nobody is kept out.
    """

    def __init__(self, folder: Path):
        path = folder / ".lock"
        self.file = os.fdopen(to_append(path), "a+")
        try:
            if fcntl:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                who = printable(path.read_text(errors="replace")[:200].strip()) or "another process"
                raise UserError(
                    f"run directory {folder} is being written by {who}; wait until it has ended, or end it"
                ) from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.file.truncate(0)
        self.file.close()
