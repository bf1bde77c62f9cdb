"""Whether this Python has the course's packages: a program that lacks them ends in one line that says what to do.

This file uses nothing but the standard library, so that a program can ask before it imports anything else.
"""

import importlib.util
import sys
import traceback

from common import ROOT

PACKAGES = ("torch", "numpy", "yaml", "tqdm", "psutil", "cloudpickle", "msgspec", "matplotlib")  # what every run uses


def missing(packages: tuple[str, ...] = PACKAGES, file: str = "requirements.txt") -> str | None:
    """The error for the first of `packages` that this Python lacks; `file` lists them."""
    name = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    if name is None:
        return None
    venv = ROOT / ".venv"
    inside = venv.exists() and sys.prefix == str(venv)
    advice = f"pip install -r {file}, in the repository's root"
    if venv.exists() and not inside:
        advice = f"activate the virtual environment first: source {venv}/bin/activate"
    elif not inside and sys.prefix == sys.base_prefix:
        advice = "make a virtual environment: python3 -m venv .venv && . .venv/bin/activate && " + advice
    return f"{sys.executable} has no package {name}; {advice}"


def on_interrupt(kind: type, error: BaseException, trace) -> None:
    """What Python calls before it ends by an exception: Ctrl-C during an import is no news of that module."""
    importing = sum(frame.f_code.co_name == "<module>" for frame, _ in traceback.walk_tb(trace)) > 1
    if kind is KeyboardInterrupt and importing:
        print("stopped before it began", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def at_start(packages: tuple[str, ...] = PACKAGES, file: str = "requirements.txt") -> None:
    """What a program calls before it imports anything else: it ends here, in one line, where a package is missing.
    `file` lists the packages.

    From here on, Ctrl-C while the other packages are imported, which takes seconds, ends it in one line as well.
    """
    sys.excepthook = on_interrupt
    if problem := missing(packages, file):
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
