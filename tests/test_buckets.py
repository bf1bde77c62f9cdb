"""The page that grows the reducer of chapter 03 grows the one of by_hand.py; and its pictures of buckets."""

import ast
from pathlib import Path

import nbformat
import pytest

from common import ROOT
from course.ddp import buckets, by_hand


def definitions(source: str) -> dict[str, str]:
    """Every function of a file or cell, also of its classes: its code, without docstring, by name; the last counts."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            found[node.name] = ast.dump(node)
    return found


def cells_of_the_page() -> list[str]:
    notebook = nbformat.read(ROOT / "03_ddp" / "01_ddp.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_reducer_that_grows_on_the_page_is_that_of_by_hand():
    """Its last versions; __init__, zero_grad and ready grow by calling their earlier selves."""
    grown = {}
    for cell in cells_of_the_page():
        if cell.startswith("MEBIBYTE") or "class Reducer" in cell:
            grown |= definitions(cell)
    finished = definitions(Path(by_hand.__file__).read_text())
    for name in ("assign", "begin", "put", "launch", "average", "finish", "no_sync"):
        assert grown[name] == finished[name], f"{name} differs between the page and by_hand.py"


@pytest.mark.parametrize(
    "gradients, bucket_bytes, backward, alpha, ends, tail",
    [
        ([1, 1, 1], 1, 3.0, 0.0, [3, 5, 7], 4),  # complete after 1, 2 and 3 s; each travels for 2 s
        ([1, 1, 1], 9, 3.0, 0.0, [9], 6),  # one bucket, which leaves at the end
        ([1, 1, 4], 1, 6.0, 0.0, [12, 14, 16], 10),  # the large one comes first and holds the others up
        ([4, 1, 1], 2, 6.0, 1.0, [7, 16], 10),  # the last two together, from 2 to 7 s; then the first, for 9 s
        ([1, 1], 1, 10.0, 0.5, [7.5, 12.5], 2.5),  # the network waits for the second
    ],
)
def test_simulated_overlap_worked_out_by_hand(gradients, bucket_bytes, backward, alpha, ends, tail):
    sent = buckets.simulate(gradients, bucket_bytes, backward, alpha, bandwidth=1.0)
    assert [bucket.end for bucket in sent] == ends
    assert buckets.exposed(sent, backward) == tail


def test_the_sliders_move_the_picture():
    lab = buckets.BucketLab()
    before = lab.picture.value
    lab.controls["bucket_mb"].value = 100
    after = lab.picture.value
    assert after != before
    lab.controls["bucket_mb"].value = 25
    assert lab.picture.value == before
