"""Predict first: every question of the site is answered by a page's own output, and by nothing else."""

import json

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
    one = PAGES["03_ddp/03_feeding"][1]
    text = questions.outputs(one.page)[one.cell]
    monkeypatch.setattr(questions, "outputs", lambda page: {one.cell: text.replace("without set_epoch:  4", "-:  4")})
    with pytest.raises(ValueError, match=one.name):
        _ = one.value


def test_a_class_is_added_up(tmp_path, capsys):
    """Judged by the pages, whatever the file says of itself."""
    number, choice = PAGES["03_ddp/03_feeding"][0], PAGES["03_ddp/03_feeding"][2]
    files = []
    for name, given in (("a", ("103", "more than half")), ("b", ("297", "about 10%")), ("c", ("1,03", "about 10%"))):
        answers = {one.name: {"given": text, "right": True} for one, text in zip((number, choice), given, strict=True)}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"predictions": answers}))
    found = questions.tally(files)
    assert (found[number.name].right, found[number.name].wrong) == (2, ["297"])
    assert (found[choice.name].right, found[choice.name].wrong) == (1, ["about 10%"] * 2)
    questions.main(list(map(str, files)))
    lines = [line for line in capsys.readouterr().out.splitlines() if " of " in line[:12]]
    assert [choice.ask in lines[0], number.ask in lines[1]] == [True, True], "the hardest first"
    for wrong in ("{}", "[]", '{"predictions": {"none#1-0": {"given": "1"}}}'):
        files[0].write_text(wrong)
        with pytest.raises(UserError, match="a.json"):
            questions.tally(files)


def test_the_site_puts_each_question_before_its_cell(conf):  # noqa: F811
    page = "01_intro/02_collectives"
    cells = conf.with_questions(json.loads((ROOT / f"{page}.ipynb").read_text())["cells"], page)
    asked = {
        cells[place + 1]["id"]: cell["source"] for place, cell in enumerate(cells) if "data-predict" in cell["source"]
    }
    assert list(asked) == [one.cell for one in PAGES[page]] and "predict-score" in cells[-1]["source"]
    assert 'data-right="hardly longer"' in asked["88a18ee8"] and "6 messages" not in asked["77845ddd"]
    assert all(text.count("<form") == 1 and " hidden>" in text for text in asked.values()), (
        "without a script, no question"
    )
