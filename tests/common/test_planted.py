"""Every mistake that is listed is refused, by the test that is named, with a message that tells the cause."""

import pytest
from helpers import FULL
from planted_front import MISTAKES as FRONT
from planted_lab import MISTAKES as LAB
from planted_runs import MISTAKES as RUNS
from planted_training import MISTAKES as TRAINING
from planting import Mistake, outcome, refusal, said

from common import ROOT

MISTAKES = [*TRAINING, *LAB, *RUNS, *FRONT]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file}: {mistake.does}")
def test_mistake_is_refused(mistake):
    refusal(mistake)


def test_every_file_of_common_has_mistakes():
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "common").rglob("*.py") if path.stat().st_size > 300}
    assert len(MISTAKES) >= 60
    assert files == {mistake.file for mistake in MISTAKES}
    assert len({(mistake.file, mistake.wrong, mistake.right) for mistake in MISTAKES}) == len(MISTAKES)


def test_the_tests_that_refuse_them_pass_without():
    """Those that are quick, here as the mistakes are; all of them with FULL=1. In the suite all of them are."""
    tests = sorted({mistake.refused_by for mistake in MISTAKES})
    code, report = outcome(None, tests if FULL else tests[::20], timeout=600)
    assert code == 0, report


def test_a_mistake_that_is_none_and_one_that_says_something_else():
    right, wrong = "data.images / 16.0", "data.images / 32.0"
    test = "tests/common/test_data.py::test_digits"

    def planted(right, wrong, says="from black to white"):
        return Mistake("common/data.py", right, wrong, "digits are grey", test, says)

    assert "from black to white" in refusal(planted(right, wrong))
    with pytest.raises(AssertionError, match="does not see it: digits are grey"):
        refusal(planted(right, "data.images / 2.0**4"))
    with pytest.raises(AssertionError, match="fails, but does not say 'upside down'"):
        refusal(planted(right, wrong, says="upside down"))
    with pytest.raises(AssertionError, match="could not run"):
        refusal(planted("import functools", "import functools_of_old"))
    for text in ("self.", "no such line"):
        with pytest.raises(ValueError, match="times, and not once"):
            refusal(planted(text, wrong))
    assert said("E  a\n   b\nFAILED c") == "a\nFAILED c"
