"""Predict first: every question of the site is answered by a page's own output, and by nothing else."""

import html
import itertools
import json
import re

import pytest

from common import ROOT, questions
from common.errors import UserError
from tests.number_rules import NUMBER
from tests.pages.test_site import conf  # noqa: F401  # a fixture

PAGES = questions.questions()


def test_every_page_of_the_trail_asks_three_to_five_questions(conf):  # noqa: F811
    asked = {page for _, _, page, _ in conf.trail() if "ten_questions" not in page}
    few = {page: len(PAGES.get(page, ())) for page in asked if not 3 <= len(PAGES.get(page, ())) <= 5}
    assert not few, f"write three to five into its chapter's questions.yaml (CONTRIBUTING.md says how), not {few}"
    assert PAGES.keys() == asked, "pages that are not on the trail"


@pytest.mark.parametrize("page", PAGES)
def test_answers_are_in_the_outputs_of_the_page(page):
    source = json.loads((ROOT / f"{page}.ipynb").read_text())
    known = "".join("".join(cell["source"]) for cell in source["cells"]) + "".join(questions.outputs(page).values())
    cells = [cell["id"] for cell in source["cells"]]
    places = [cells.index(one.cell) for one in PAGES[page]]
    assert places == sorted(places), "asked in the order of the page"
    for one in PAGES[page]:
        assert one.cell not in one.before and all(cells.index(cell) < cells.index(one.cell) for cell in one.before)
        found = one.found
        shown = "".join(questions.outputs(page).get(cell, "") for cell in (*one.before, one.cell))
        clock = [group for group in found if group and f"~{group}" in shown]
        assert not clock, f"{one.name}: a clock has measured {clock}"
        if one.choices is None:
            low, high = one.interval
            assert low <= one.value <= high and one.is_right(found[one.answer])
            assert not one.is_right(str(high + 1)) and not one.is_right("a lot")
        else:
            choices = [one.filled(choice) for choice in one.choices]
            assert sum(map(one.is_right, choices)) == 1 and len({*choices}) == len(choices) > 1
        typed = [
            number for number in NUMBER.findall(one.filled(one.because)) if len(number) > 1 and number not in known
        ]
        assert not typed, f"{one.name}: {typed} are on the page nowhere"


def test_a_changed_output_is_noticed(monkeypatch):
    monkeypatch.setattr(questions, "outputs", lambda page: {})
    for one in itertools.chain(*PAGES.values()):
        with pytest.raises(ValueError, match=one.name):
            _ = one.found


def test_a_class_is_added_up(tmp_path, capsys):
    """Judged by the pages, whatever the file says of itself."""
    every = [*itertools.chain(*PAGES.values())]
    number, choice = (next(one for one in every if (one.choices is None) == asked) for asked in (True, False))
    digits, wrong = f"{number.value:g}", next(c for c in map(choice.filled, choice.choices) if not choice.is_right(c))
    right, files = choice.filled(choice.right), []
    for name, *given in (("a", digits, right), ("b", "-297", wrong), ("c", f"{digits[0]},{digits[1:]}", wrong)):
        answers = {one.name: {"given": text, "right": True} for one, text in zip((number, choice), given, strict=True)}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"predictions": answers}))
    found = questions.tally(files)
    assert (found[number.name].right, found[number.name].wrong) == (2, ["-297"])
    assert (found[choice.name].right, found[choice.name].wrong) == (1, [wrong] * 2)
    questions.main(list(map(str, files)))
    lines = [line for line in capsys.readouterr().out.splitlines() if " of " in line[:12]]
    assert [choice.ask in lines[0], number.ask in lines[1]] == [True, True], "the hardest first"
    odd = (None, 1, "a", [], [1])
    answers = (*odd, *({number.name: one} for one in odd), {"none#1-0": {"given": "1"}})
    for wrong in (*odd, {}, *({"predictions": one} for one in answers)):
        files[0].write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="a.json"):
            questions.tally(files)


def test_the_site_puts_each_question_before_its_cell(conf):  # noqa: F811
    page = "01_intro/02_collectives"
    cells = conf.with_questions(json.loads((ROOT / f"{page}.ipynb").read_text())["cells"], page)
    asked = {
        cells[place + 1]["id"]: cell["source"] for place, cell in enumerate(cells) if "data-predict" in cell["source"]
    }
    assert list(asked) == [one.cell for one in PAGES[page]] and "predict-score" in cells[-1]["source"]
    for one, text in zip(PAGES[page], asked.values(), strict=True):
        judged = dict(re.findall(r'data-(right|low|high)="([^"]*)"', text))
        right = one.choices is not None and one.is_right(html.unescape(judged["right"]))
        assert right or float(judged["low"]) <= one.value <= float(judged["high"]), one.name
        assert text.count("<form") == 1 and " hidden>" in text, "without a script, no question"
