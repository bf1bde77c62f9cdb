"""The catalogue of mistakes: each program says what its entry says, and its fixed line works."""

import re

import psutil
import pytest

from course.ddp import catalogue
from course.ddp.catalogue import Ended, Mistake, message, missing, mistakes, outcome, run, run_wrong

NAMES = sorted(mistakes())
FAILS_IN_ANY_CASE = "barrier_in_finally"  # fixed, it says at once why


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Ended]]:
    """Of every program, and of "NAME fixed"."""
    return run_wrong(NAMES) | run({f"{name}_fixed": found.fixed for name, found in mistakes().items()})


def told(ended: list[Ended]) -> str:
    return "\n".join(f"rank {rank}, exit code {one.code}:\n{one.output}" for rank, one in enumerate(ended))


@pytest.mark.parametrize("name", NAMES)
def test_the_message_in_the_book_is_the_message_that_appears(name, outcomes):
    ended = outcomes[name]
    assert missing(mistakes()[name].messages, ended) == [], told(ended)
    assert missing(mistakes()[name].then, ended), f"what the fixed program prints appears anyway:\n{told(ended)}"


@pytest.mark.parametrize("name", NAMES)
def test_the_fixed_line_works(name, outcomes):
    ended = outcomes[f"{name}_fixed"]
    assert missing(mistakes()[name].then, ended) == [], told(ended)
    assert missing(mistakes()[name].messages, ended), f"what the program said before appears still:\n{told(ended)}"
    assert any(one.code for one in ended) == (name == FAILS_IN_ANY_CASE), told(ended)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_short_and_has_one_place_that_is_wrong(name):
    found = mistakes()[name]
    lines = found.source.split('"""', 2)[2].strip().splitlines()
    assert len(lines) <= 25
    assert len(re.findall(r"(?:.*# wrong\n)+", found.source)) == 1 and found.right
    assert "# right" not in found.fixed and "# wrong" not in found.fixed
    assert not re.search("# right", found.program) and found.see and found.find and found.fix


def test_there_are_enough_and_each_has_a_title_of_its_own():
    assert len(NAMES) >= 24
    assert len({found.title for found in mistakes().values()}) == len(NAMES)


def test_a_message_that_does_not_appear_is_missed():
    ended = [Ended(1, "Timed out after 3 s\n"), Ended(None, "")]
    expected = [message(text) for text in ("some rank: Timed ... 3 s", "rank 1: Timed out", "rank 0: 4 s...Timed")]
    assert expected[0] == (None, "Timed ... 3 s") and expected[1] == (1, "Timed out")
    assert missing(tuple(expected), ended) == ["Timed out", "4 s...Timed"]


def test_right_lines_take_the_place_of_the_wrong_ones():
    wrong = "    # right: a()\n    # right: b()\n    c()  # wrong\n    if y:  # wrong\n"
    source = f'"""T"""\n\nif x:\n{wrong}d(timedelta(seconds=3))\n'
    found = Mistake("n", "T", (), (), "", "", "", source)
    assert found.fixed == '"""T"""\n\nif x:\n    a()\n    b()\nd(timedelta(seconds=60))\n'
    program = "if x:\n    c()  # wrong\n    if y:  # wrong\nd(timedelta(seconds=3))"
    assert found.program == program and found.right == "a()\nb()"


def test_a_rank_that_is_still_at_work_is_killed(monkeypatch):
    monkeypatch.setattr(catalogue, "START", 1.0)
    before = psutil.Process().children()
    (one, other) = run({"sleeps": "import time\ntime.sleep(600)\n"})["sleeps"]
    assert one.code is other.code is None, "it has no code of its own"
    assert not {*psutil.Process().children()} - {*before}


def test_an_outcome_is_silent_where_all_ranks_end_well_and_nowhere_else():
    for name in mistakes():
        found = [outcome(name, [Ended(code, "") for code in codes]) for codes in ((0, 0), (0, 1), (1, 0))]
        assert found[0] == "silent" and found[1] == found[2] in ("error", "timeout"), name
