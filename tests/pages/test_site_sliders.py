"""The site's sliders: a page's own cell, run without Matplotlib, ipywidgets and torch, draws what the notebook draws.

What stands in for the two packages (docs/site/python) is compared with the packages themselves: texts and bars."""

import contextlib
import json

import pytest

from common.lab import sliders
from tools import site_cells

CELLS = site_cells.all_cells()
MOVED = """
import html, json, sys, page_sliders as page
def drawn(reply):  # without the controls' values in words, which stand beside the picture
    return reply["html"].replace(html.escape(page.description_of(lab)), "")
for cell in {cells!r}:
    lab, failed = page.of(cell), []
    first = json.loads(page.reply(json.dumps(dict(cell=cell))))
    before_any, places = drawn(first), len(first["html"])
    if json.loads(page.reply(json.dumps(dict(cell=cell)))) != first or len(before_any) == places:
        failed.append("asked twice, another picture; or its words are not there")
    for name, control in lab.controls.items():
        before = control.value
        if hasattr(control, "options"):
            given = str((control.place + 1) % len(control.options))
        elif isinstance(before, bool):
            given = "false" if before else "true"
        else:
            given = str(control.min)
        found = json.loads(page.reply(json.dumps(dict(cell=cell, values={{name: given}}))))
        if name not in first["closed"] and drawn(found) == before_any:
            failed.append(name)
        control.value = before
    print(json.dumps([cell, first["html"], failed]))
print(json.dumps(sorted({{"torch", "numpy"}} & set(sys.modules))))
"""


class Shown(Exception):
    pass


def drawn_by_matplotlib(program: str, monkeypatch):
    """The figure that a cell's sliders show first."""
    figures = []
    monkeypatch.setattr(sliders, "png", lambda figure, dpi: figures.append(figure) or b"")
    monkeypatch.setattr(sliders.Sliders, "show", lambda lab, alt: (_ for _ in ()).throw(Shown))
    with contextlib.suppress(Shown):
        exec(program, {"__name__": "cell"})
    return figures[-1]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    site_cells.laid_out(folder)
    *lines, loaded = site_cells.alone(MOVED.format(cells=list(CELLS)), folder).splitlines()
    assert json.loads(loaded) == [], "what a browser has not"
    return {cell: (html, failed) for cell, html, failed in map(json.loads, lines)}


@pytest.mark.parametrize("cell", CELLS)
def test_the_live_picture_has_the_texts_and_bars_of_the_stored_one(cell, live, monkeypatch):
    html, failed = live[cell]
    assert not failed, "controls that change nothing"
    figure = drawn_by_matplotlib(CELLS[cell], monkeypatch)
    texts = [text.get_text() for ax in figure.axes for text in [*ax.texts, ax.title, ax._left_title]]
    lines = [line.strip() for text in texts for line in text.split("\n") if line.strip()]
    plain = html.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")
    assert lines and not [line for line in lines if line not in plain]
    assert html.count("<rect") >= sum(len(ax.patches) for ax in figure.axes)


def test_a_cell_is_cut_down_to_what_its_sliders_need():
    cells = [
        "import torch\nfrom a import rate, other",
        "def used(x):\n    return rate * x\n\n\ndef not_used():\n    return torch.zeros(1)",
        "print(other)\nlab = Lab(used)\nlab.controls['x'].value = 3\nlab.show(alt='x')\nprint(lab)",
    ]
    found = site_cells.needed(["from b import Lab", *cells])
    assert "torch" not in found and "print" not in found
    at = [found.index(text) for text in ("import Lab", "rate", "def used", "Lab(used)", "= 3", ".show(")]
    assert at == sorted(at)
    with pytest.raises(ValueError):
        site_cells.needed(["x = 1"])
