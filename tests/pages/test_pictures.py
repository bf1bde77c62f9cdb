"""The README's pictures: those that the script draws, and small enough for a first screen."""

import runpy

import numpy as np
from PIL import Image

from common import ROOT
from course.pipeline import lab

KEPT = ROOT / "docs" / "pictures"
PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))


def test_the_animation_is_what_the_simulator_says(tmp_path):
    frames = PICTURES["schedules"]()
    PICTURES["save"](frames, tmp_path / "schedules.gif")
    with Image.open(KEPT / "schedules.gif") as kept, Image.open(tmp_path / "schedules.gif") as new:
        assert (kept.n_frames, kept.size) == (new.n_frames, new.size) == (len(frames), frames[0].size)
        for number in (0, len(frames) // 2, len(frames) - 1):
            kept.seek(number)
            new.seek(number)
            grey = [np.asarray(image.convert("L").resize((80, 60)), dtype=int) for image in (kept, new)]
            assert (abs(grey[0] - grey[1]) > 40).sum() < 80, number  # fonts and versions of Pillow may differ a bit


def test_they_are_small_and_shown_with_what_they_say():
    readme = (ROOT / "README.md").read_text()
    for path in KEPT.iterdir():
        assert path.stat().st_size < 1_000_000
        assert f"](docs/pictures/{path.name})" in readme
    for name in PICTURES["SCHEDULES"]:
        drawn = lab.run(name, ranks=4, microbatches=8)
        for number in (f"{float(drawn.makespan):g}", f"{float(drawn.bubble):.0%}"):
            assert number in readme, f"{name}, as it is drawn"
