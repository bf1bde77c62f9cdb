"""Errors whose text is meant for the person who typed the command, and where it stands: at the end of the screen."""

import argparse
import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it
OUTLIVES = 120  # seconds: torchrun lets a rank end for so long, or less, when another has died (--shutdown-timeout)


class UserError(Exception):
    """One line that names what is wrong and what to do."""


class LostPeer(UserError):
    """Another rank has died, or does not answer. Of its own it has nothing to say, or nothing so useful."""


class Parser(argparse.ArgumentParser):
    """A command line whose errors are one line, as all others are."""

    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")

    def asked(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The options of a program that refuses nothing else: it ends here, in one line, where they are wrong."""
        with one_line_errors():
            return self.parse_args(argv)


def finite(text: str) -> float:
    """The type of an argparse option that is a number: nan and infinity are refused."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, not '{text}'")
    return value


@contextmanager
def writing(path):
    """Raise UserError, which names the file or folder, where what is done inside cannot write it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def one_line_errors():
    """Turn a UserError, memory that is used up, and a message to a rank that is gone into one line and exit code 2:
    once per node where all ranks have the same error. The line goes to stderr; under torchrun it stands at the end of
    torchrun's own report instead."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped before the first step", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        line = str(error) if isinstance(error, UserError) else out_of_memory(error) or lost_peer(error)
        if line is None:
            raise
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:
            # Most likely rank 0 of this node says the same at this moment, and torchrun ends the others as
            # soon as it exits. Whoever is still here afterwards had an error of its own.
            time.sleep(3)
        _report(f"error: {line}", isinstance(error, LostPeer) or bool(lost_peer(error)))
        sys.exit(2)


def out_of_memory(error: Exception) -> str | None:
    """What to do, if memory was used up: that of a GPU, or the host's."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?[A-Za-z]+)", str(error))
    words = ("can't allocate memory", "not enough memory", "out of memory")
    if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
        return None
    how_much = f" (the next piece would have been {asked[1]})" if asked else ""
    return (
        f"out of memory{how_much}; try a smaller --batch-size, --context or --width, or more --accumulation-steps, "
        f"which compute the same batch in smaller parts"
    )


def lost_peer(error: BaseException | None) -> str | None:
    """What has happened, if gloo says that a rank with which this one shares a collective is no more."""
    lost = re.search("Connection (closed|reset) by peer", str(error)) if isinstance(error, RuntimeError) else None
    return f"another rank has died ({lost[0]}): see its message, or torchrun's report, for the cause" if lost else None


def _report(line: str, of_another: bool) -> None:
    """Put `line` where it will be the last thing to be read.

    Under torchrun that is the file from which torchrun's report takes what it calls the traceback of a rank: what a
    rank itself writes to stderr stands some forty lines above. With --max-restarts the report comes after the last
    attempt only, and those before it say their line themselves.
    """
    reported = into_report(line, of_another)
    attempts_left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    )
    if not reported or attempts_left > 0:
        print(line, file=sys.stderr, flush=True)


def into_report(line: str, of_another: bool = False) -> bool:
    """Have torchrun's report, if there is one to come, say `line` for this rank. False without torchrun.

    of_another: it is about another rank's death, and has to stand where torchrun puts what it calls the root cause: the
    earliest failure, at the end. torchrun may know of the death before this rank does, so its time is put back."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    # Whole seconds: what is taken off an error of this rank's own puts it before what the others say of its end.
    about = {"py_callstack": line, "timestamp": str(int(time.time()) - (OUTLIVES if of_another else 1))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": about}}))
    except OSError:
        return False
    return True
