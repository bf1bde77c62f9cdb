"""What pages repeat from code and data is what `make facts` writes."""

import os
import re
import subprocess
import sys

import pytest

from common import ROOT, check
from common.grading.engine import Exercise
from tools import facts


def test_pages_say_what_code_and_data_say():
    found = [f"{page.relative_to(ROOT)}, {which}" for page, _, which in facts.differing()]
    assert not found, "\n".join(["these differ from code and data: run `make facts`", *found])


def test_nothing_is_left_to_write():
    assert not (left := [*facts.left_to_write()]), "\n".join(left)


def test_every_fact_stands_on_a_page():
    text = "\n".join(page.read_text() for page in facts.PAGES)
    assert {place[2] for place in facts.MARK.finditer(text)} == {*facts.FACTS}
    assert text.count("<!-- facts: ") == text.count("<!-- end -->") == len(facts.MARK.findall(text)), "marks in pairs"


def test_a_table_keeps_what_somebody_wrote_and_asks_for_what_nobody_has():
    old = "\n| `--strategy` | what is divided over the processes |\n|---|---|\n| `ddp` | my own words |\n"
    lines = {line.split("|")[1].strip(): line for line in facts.strategies(old, "").splitlines() if "|" in line}
    assert "my own words" in lines["`ddp`"] and f"| {facts.TO_WRITE} |" in lines["`fsdp`"]


def test_a_page_that_is_out_of_date_is_named_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("It waits <!-- facts: seconds of a collective -->7<!-- end --> seconds.\n")
    monkeypatch.setattr(facts, "PAGES", [page])
    monkeypatch.setattr(facts, "EVERY_NOTEBOOK", [])
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    for line, code, told in ((["--check"], 1, "run `make facts`"), ([], 0, "page.md"), (["--check"], 0, "")):
        with pytest.raises(SystemExit, check=lambda end, code=code: end.code == code):
            facts.main(line)
        assert told in capsys.readouterr().out
    assert re.fullmatch(r"It waits <!-- facts: [\w ]+ -->(?!7<)\d+<!-- end --> seconds\.\n", page.read_text())
    page.write_text("<!-- facts: zyzzyva -->x<!-- end -->")
    with pytest.raises(KeyError, match="zyzzyva"):
        [*facts.differing()]


def test_one_more_exercise_is_counted(monkeypatch):
    before = facts.chapters("", "")
    more = Exercise("ring_shift", 7, "●○○○○", lambda size: (), "")
    monkeypatch.setattr(facts.check, "exercises_of", lambda chapter, real=check.exercises_of: [*real(chapter), more])
    pairs = zip(before.splitlines(), facts.chapters("", "").splitlines(), strict=True)
    numbers = [(re.findall(r"\| (\d+) (?=\|)", a), re.findall(r"\| (\d+) (?=\|)", b)) for a, b in pairs if "](" in a]
    assert numbers and all(int(new[1]) == int(old[1]) + 1 and new[0] == old[0] for old, new in numbers)


def test_a_minute_is_150_words_or_8_lines_of_code():
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    prose = "word " * 300 + "[link](of/no/words.md) `x`\n\n```\n" + "x = 1\n\n" * 16 + "```\n"
    cells = [new_markdown_cell(prose), new_code_cell("\n\n".join(["y = 2"] * 8))]
    assert facts.reading_minutes(new_notebook(cells=cells)) == pytest.approx(302 / 150 + 16 / 8 + 8 / 8)


def test_what_a_target_runs_is_what_make_would_run():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    for target in ("lint", "site-check", "coverage"):
        make = ["make", "--dry-run", "--always-make", target, f"VENV={sys.prefix}"]
        done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        printed, said = done.stdout, facts.commands_of(target)
        lines = iter([re.sub(r"\S*/bin/|python -m (?=pip)", "", line).strip() for line in printed.splitlines()])
        assert said and all(line in lines for line in said), f"make {target}, in this order: {printed}"
    assert all(line.startswith("FULL=1 ") for line in facts.commands_of("test-all"))
