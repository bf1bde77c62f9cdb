"""Importing this ends a program whose Python lacks the course's packages, in one line that says what to do.

So it is the first import of what is started. It uses nothing but the standard library.
"""

import importlib.util
import sys

from common import ROOT

PACKAGES = ("torch", "numpy", "yaml", "tqdm", "psutil", "cloudpickle", "matplotlib")  # what every run uses


def missing(packages: tuple[str, ...] = PACKAGES) -> str | None:
    """The error for the first of `packages` that this Python lacks."""
    name = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    if name is None:
        return None
    venv = ROOT / ".venv"
    inside = venv.exists() and sys.prefix == str(venv)
    advice = "pip install -r requirements.txt, in the repository's root"
    if venv.exists() and not inside:
        advice = f"activate the virtual environment first: source {venv}/bin/activate"
    elif not inside and sys.prefix == sys.base_prefix:
        advice = "make a virtual environment: python3 -m venv .venv && . .venv/bin/activate && " + advice
    return f"{sys.executable} has no package {name}; {advice}"


if problem := missing():
    print(f"error: {problem}", file=sys.stderr, flush=True)
    sys.exit(2)
