"""What no chapter teaches: running a training (here), looking at it (lab), checking exercises (grading)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the repository
