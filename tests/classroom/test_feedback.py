"""What learners and teachers read of verdicts, whole: the table, hints, a class's rows and pages."""

import sys

from common.grading import engine, sandbox
from common.grading.classes import Grading
from common.grading.engine import Exercise, Verdict
from common.grading.feedback import bar, stages, table


def some_verdicts() -> list[Verdict]:
    """A right, a wrong and no answer."""
    right, wrong, left = (
        Exercise(name, points, "●" * number + "○" * (5 - number), lambda size: [], "A hint.")
        for number, (name, points) in enumerate([("sum", 3), ("mean_of_all", 12), ("tree", 2)], start=1)
    )
    drawing = engine.Drawing("rank 0  F0\nrank 1  .", lambda: None, "a picture")
    called = ("rank 0: mean_of_all([1])", "rank 1: mean_of_all([2])")
    mistaken = Verdict(wrong, "wrong", "world size 2, ones, rank 1", "5", "6", drawing, called, ("rank 1: half",))
    return [Verdict(right, "right"), mistaken, Verdict(left, "not attempted")]


TABLE = """\
exercise     difficulty  minutes  status         points
sum          ●○○○○             5  right           3 of 3
mean_of_all  ●●○○○            20  wrong           0 of 12
tree         ●●●○○                not attempted   0 of 2
total                             1 of 3 right    3 of 17

mean_of_all: world size 2, ones, rank 1
  input     rank 0: mean_of_all([1])
            rank 1: mean_of_all([2])
  expected  5
  got       6
  printed   rank 1: half
  hint      python -m common.check mean_of_all --hint

  rank 0  F0
  rank 1  .

next: tree ●●●○○"""
ONE = """\
exercise  difficulty  status         points
sum       ●○○○○       right           3 of 3
total                 1 of 1 right    3 of 3

  printed   rank 0: 6
            rank 1: 6"""
UNUSED = """\
exercise  difficulty  status         points
sum       ●○○○○       not graded      0 of 3
total                 0 of 1 right    0 of 3

the file could not be used: SyntaxError: invalid syntax"""


def test_the_table_of_verdicts_is_this():
    verdicts = some_verdicts()
    assert table(verdicts, minutes={"sum": "5", "mean_of_all": "20"}) == TABLE, "the table with minutes and a drawing"
    plain = TABLE.replace("\n  rank 0  F0\n  rank 1  .\n", "")
    assert table(verdicts, False, {"sum": "5", "mean_of_all": "20"}) == plain, "the table of a notebook: no drawing"
    alone = Verdict(verdicts[0].exercise, "right", printed=("rank 0: 6", "rank 1: 6"))
    assert table([alone]) == ONE, "the table of one exercise with a short name, without minutes"
    assert table([Verdict(alone.exercise, "not graded", got="SyntaxError: invalid syntax")]) == UNUSED


def test_hints_come_sentence_by_sentence():
    hint = "Count: all. Use `a.b` here! Is 2.5 more? 3 is. `x` too."
    shown = stages(Exercise("sum", 1, "easy", lambda size: [], hint))
    assert shown == ["Count: all.", "Use `a.b` here!", "Is 2.5 more?", "3 is.", "`x` too."], "a hint's sentences"


def test_a_bar_is_as_long_as_what_is_done():
    assert (bar(0, 3, 6), bar(1, 3, 6), bar(3, 3, 6)) == ("[......] 0 of 3", "[##....] 1 of 3", "[######] 3 of 3")


ROWS = """\
submission,sum,mean_of_all,tree,points,maximum,note
ann,right,wrong,not attempted,3,17,"mean_of_all: world size 2, ones, rank 1: expected 5, got 6"
'=bob,not graded,not graded,not graded,0,17,SyntaxError: invalid syntax
cat,wrong,right,wrong,12,17,"sum: world size 2: expected 1, got 2 | tree: here: expected 3, got 4"
dan,not graded,not graded,not graded,0,17,not finished after 7 s
"""


def test_rows_and_pages_of_a_class_are_these(tmp_path, monkeypatch, capfd):
    verdicts = some_verdicts()
    exercises = [verdict.exercise for verdict in verdicts]
    unloaded = [Verdict(exercise, "not graded", got="SyntaxError: invalid\nsyntax") for exercise in exercises]
    two = [Verdict(exercises[0], "wrong", "world size 2", "1", "2"), Verdict(exercises[1], "right"),
           Verdict(exercises[2], "wrong", "here", "3", "4")]  # fmt: skip
    results = {"ann": verdicts, "=bob": unloaded, "cat": two, "dan": "not finished after 7 s"}
    monkeypatch.setattr(Grading, "one", lambda grading, copied, hidden=(): results[copied.read_text()])
    monkeypatch.setattr(sandbox, "available", lambda: None)
    for name in results:
        (tmp_path / name).mkdir()
        (tmp_path / name / "exercises.py").write_text(name)
    pages, minutes = tmp_path / "new" / "pages", {"sum": "5", "mean_of_all": "20"}
    files = {name: tmp_path / name / "exercises.py" for name in results}
    Grading(exercises, minutes, 7.0, pages).all(files)
    output = capfd.readouterr()
    assert (output.out, output.err) == (ROWS, ""), "a row for each submission"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Grading(exercises, minutes, 7.0, pages).all(files)  # once more: the folder of pages is there
    told = "".join(f"\r\033[K{number} of 4: {name}" for number, name in enumerate(results, start=1))
    assert capfd.readouterr().err == told, "progress on a terminal"
    assert sorted(page.name for page in pages.iterdir()) == ["=bob.md", "ann.md", "cat.md", "dan.md"]
    assert (pages / "ann.md").read_text() == f"# ann\n\n```\n{TABLE}\n```\n", "a page is the table that a learner sees"
    results["dan"] = "half a pair: \ud800"
    Grading(exercises, minutes, 7.0, pages).all({"dan": files["dan"]})
    assert (pages / "dan.md").read_text() == "# dan\n\n```\nhalf a pair: ?\n```\n", "what cannot be written"
    results["dan"] = "not finished after 7 s"
    Grading(exercises, minutes, 7.0, pages).all({"dan": files["dan"]})
    assert (pages / "dan.md").read_text() == "# dan\n\n```\nnot finished after 7 s\n```\n"
