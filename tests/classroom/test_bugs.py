"""Planted bugs: made by putting a wrong text for a right one, listed, shown without and with their answer."""

import re
import traceback

import pytest

from common.lab.bugs import Bug, Bugs

BY_HAND = """\
import os

LIMIT = 1


def other(x):
    return x + LIMIT


def helper(x):
    return x + LIMIT


class Adds:
    def __init__(self, x):
        self.x = x + LIMIT

    def add(self, y):
        return self.x + y


def total(xs):
    return sum(helper(x) for x in xs)
"""
LAYERS = "def other(xs):\n    return LIMIT + sum(xs)\n\n\ndef total(xs):\n    return other(xs)\n"


@pytest.fixture
def bugs(tmp_path) -> Bugs:
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    (tmp_path / "layers.py").write_text(LAYERS)
    about = {"refused_by": "the check", "why": "It is wrong."}
    table = {
        "inside": Bug("total", "x + LIMIT", "x - LIMIT", inside="helper", **about),
        "method": Bug("Adds", "self.x + y", "self.x * y", inside="add", **about),
        "layers": Bug("total", "LIMIT + ", "1 / 0 + ", inside="other", file="layers.py", ranks=2, **about),
    }
    return Bugs(str(tmp_path / "classroom" / "bugs.py"), table)


def test_the_first_such_text_at_or_after_its_place_is_replaced(bugs):
    wrong = BY_HAND.replace("def helper(x):\n    return x + LIMIT", "def helper(x):\n    return x - LIMIT")
    assert bugs.source("inside") == wrong, "the text in helper alone"
    assert bugs.source("method") == BY_HAND.replace("self.x + y", "self.x * y"), "a method of a class"
    assert (bugs["inside"].ranks, bugs["layers"].ranks) == (4, 2)


@pytest.mark.parametrize("target, right", [("total", "x + LIMIT"), ("helper", "x - LIMIT"), ("nowhere", "x + LIMIT")])
def test_a_text_that_is_gone_is_an_error(bugs, tmp_path, target, right):
    """It is looked for from the function on, not before it: `helper` stands before `total`."""
    table = {"name": Bug(target, right, "1", refused_by="", why="")}
    with pytest.raises(ValueError, match=f"by_hand.py.*{re.escape(right)}.*{target}"):
        Bugs(str(tmp_path / "classroom" / "bugs.py"), table).plant("name")


def test_what_is_planted_is_called_like_the_right_one(bugs):
    assert bugs.plant("inside")([5, 7]) == 10, "4 + 6: one less of each, and not one more"
    assert bugs.plant("method")(5).add(2) == 12, "6 * 2"
    with pytest.raises(ZeroDivisionError) as error:
        bugs.plant("layers")([1])
    frame = traceback.extract_tb(error.value.__traceback__)[-1]
    told = (frame.filename, frame.lineno, frame.line)
    assert told == ("<layers>", 2, "return 1 / 0 + sum(xs)"), "a traceback shows the planted line"
    assert bugs.plant("inside").__module__ == "inside", "by which a place in it is known"
