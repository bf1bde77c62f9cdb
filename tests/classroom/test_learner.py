"""What a learner is told in a terminal: the chapter inferred, one failure at a time, hints, inputs, prints."""

import contextlib
import os
import threading
from dataclasses import replace

import torch
from hostile import SHIFT

from common import check
from common.grading import command, engine, values
from common.grading.feedback import stages

EXERCISES = [exercise for chapter in check.chapters() for exercise in check.exercises_of(chapter)]


def named(name: str):
    (exercise,) = [exercise for exercise in EXERCISES if exercise.name == name]
    return exercise


def test_the_chapter_is_inferred(tmp_path, monkeypatch, capfd):
    for folder in ("04_model_parallel", "04_model_parallel/classroom"):
        monkeypatch.chdir(check.ROOT / folder)
        assert check.chapter_here() == "04_model_parallel", f"the chapter of {folder}"
    monkeypatch.chdir(tmp_path)
    for chapter in check.chapters():
        (tmp_path / chapter).mkdir()
        file = tmp_path / chapter / "exercises.py"
        file.write_text("def f():\n    raise NotImplementedError\n")
        os.utime(file, (1, 3 if chapter == "06_fsdp" else 1))
    there = check.chapters()
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "chapters", lambda: there)
    assert check.chapter_here() == "01_intro", "where nothing is begun"
    for time, chapter in enumerate(("05_pipeline", "02_data_parallel")):
        (tmp_path / chapter / "exercises.py").write_text("def f():\n    return 1\n")
        os.utime(tmp_path / chapter / "exercises.py", (1, 2 - time))
    assert check.chapter_here() == "05_pipeline"
    assert "05_pipeline: its exercises.py was saved last" in capfd.readouterr().err


def test_an_exercise_is_found_in_its_chapter(capfd):
    assert check.chapter_with("ring_shift") == "01_intro"
    assert check.main(["global_mean", "--hint"]) == 0
    one, more = capfd.readouterr().out.splitlines()
    first, second = stages(named("global_mean"))
    assert first in one and second not in one and "common.check global_mean --hint 2" in more
    assert check.main(["01_intro", "global_mean", "--hint", "2"]) == 0
    _, last = capfd.readouterr().out.splitlines()
    assert second in last, "and there are no more"


def test_watch_shows_one_failure_at_a_time_until_all_is_right(tmp_path, monkeypatch, capfd):
    """Checked whenever the file is saved. What was right and no longer is comes up again at the end."""
    file, texts, said = tmp_path / "exercises.py", ["half", "both", "broken", "good"], []
    status = {"half": "right wrong", "both": "right right", "broken": "wrong right", "good": "right right"}
    first, second = named("ring_shift"), replace(named("global_mean"), points=3)
    checked = []

    def verdicts(chapter, path, only, progress=None):
        checked.append((path.read_text(), only))
        if path.read_text() == "both" and len(checked) > 2 and only == second.name:
            path.write_text("broken")  # an edit meanwhile
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # as if it were saved while it is checked
        number = [first.name, second.name].index(only)
        result = status[checked[-1][0]].split()[number]
        return [engine.Verdict([first, second][number], result, "here", "1", "2", inputs=("rank 0: f(1)",))]

    def wait(path, before):
        assert before < path.stat().st_mtime_ns, "what was saved during a check is waited for"
        said.append(capfd.readouterr().out)
        path.write_text(texts[len(said)] if len(said) < 2 else "good")

    file.write_text("half")
    monkeypatch.setattr(check, "chosen_from", lambda chapter, only: [first, second])
    monkeypatch.setattr(check, "verdicts", verdicts)
    check.watch("01_intro", file, wait=wait)
    assert len(said) == 2, "waits for an edit: an exercise that a later edit broke is not right any more"
    right, _, now, where, *more = said[0].splitlines()
    assert "ring_shift" in right and "1 of 2" in right and "global_mean" in now and "10 minutes" in now
    assert where == "global_mean: here" and any("rank 0: f(1)" in line for line in more)
    assert "exercises.py" in more[-1], "what is waited for"
    assert "ring_shift" in said[1]
    assert "4 points" in capfd.readouterr().out.splitlines()[-1]
    ring, mean = first.name, second.name
    assert checked == [
        ("half", ring), ("half", mean), ("both", mean), ("broken", ring), ("broken", mean), ("broken", ring),
        ("good", ring), ("good", ring), ("good", mean),
    ], "what is right is checked again in the end"  # fmt: skip


def test_watch_begins_with_what_is_begun(tmp_path, monkeypatch, capfd):
    """An exercise that is still as it was handed out stops nobody, and takes no launch."""
    file, checked = tmp_path / "exercises.py", []
    shipped = (check.ROOT / "01_intro" / "exercises.py").read_text()
    file.write_text(shipped + "\n\ndef all_to_all(parts, lengths):\n    return []\n")

    def verdicts(chapter, path, only, progress=None):
        checked.append(only)
        return [engine.Verdict(named(only), "right" if len(checked) > 1 else "wrong", "here", "1", "2")]

    def wait(path, before):
        said = capfd.readouterr().out
        assert ("all_to_all: here" in said) == (len(checked) == 1)
        if len(checked) == 2:
            assert "1 of 9" in said and "now ring_shift" in said, "by itself"
            line = shipped.splitlines().index("def ring_shift(tensor: torch.Tensor) -> torch.Tensor:") + 1
            assert f"{file}:{line}" in said and "ring_shift --hint" in said, "where to write, and what helps"
            raise KeyboardInterrupt

    monkeypatch.setattr(check, "verdicts", verdicts)
    with contextlib.suppress(KeyboardInterrupt):
        check.watch("01_intro", file, wait=wait)
    assert checked == ["all_to_all", "all_to_all"]


def test_a_chapter_is_named_by_its_folder_its_number_or_its_file():
    words = ("03", "3", "03_ddp/", str(check.ROOT / "03_ddp/exercises.py"), "x")
    assert [command.chapter_named(word) for word in words] == ["03_ddp"] * 4 + ["x"]


def test_minutes_are_those_that_the_stubs_allow(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "exercises.py").write_text(
        'import a\ndef f(x):\n    """Text.\n\n    up to 10 minutes\n    2 points"""\n'
        'def helper(): ...\ndef g():\n    """up to 25 minutes"""\n'
    )
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.minutes_of("x") == {"f": "10", "g": "25"}, "minutes of each exercise"


def test_a_class_is_graded_without_the_solutions_too(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(check, "exercises_of", lambda chapter: ["the table"])
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.for_a_class("01_intro") == ["the table"]
    assert "solutions.py" in capfd.readouterr().err, "what a grade does not rest on"


def test_until_saved(tmp_path):
    file = tmp_path / "exercises.py"
    file.write_text("1")
    check.until_saved(file, before=0)  # it is not as it was: returns at once
    before = file.stat().st_mtime_ns
    saving = threading.Timer(0.3, lambda: os.utime(file, ns=(before + 1, before + 1)))
    saving.start()
    check.until_saved(file, before)
    assert file.stat().st_mtime_ns == before + 1
    saving.join()
    file.unlink()  # as some editors do before they write it anew
    saving = threading.Timer(0.1, file.touch)
    saving.start()
    check.until_saved(file, before)
    assert file.exists(), "a file that is gone is not saved yet"
    saving.join()


def test_inputs_are_shown_so_that_numbers_can_be_computed_again():
    x = torch.tensor([1.5, 2.0])
    (alike,) = values.inputs([(x, 3), (x, 3)], "f")
    assert "f([1.5, 2], 3)" in alike, "one line where all ranks are given the same"
    first, second = values.inputs([(x,), (x.double(),)], "f")
    assert "rank 0" in first and "f([1.5, 2])" in first and "rank 1" in second and "float64" in second
    for value, words in (
        ([x[0], [(2,), (2, 3), ()]], "1.5 float32 [(2,), (2, 3), ()]"),
        (torch.ones(300_000), "[1, 1, 1, 300,000 float32"),
        ([torch.ones(2, 2), "ring"], "[[1, 1], [1, 1]] float32 'ring'"),
        (torch.arange(1.0, 7).view(2, 3), "[[1, 2, 3], [4, 5, 6]] float32"),
        (torch.arange(20), "[0, 1, 2, 20 int64"),
        (tuple(range(20)), "(0, 1, 2,"),
        ("x" * 100, "xxx"),
    ):
        shown = values.argument(value)
        assert len(shown) <= 60 and not [word for word in words.split() if word not in shown], shown
    for size in (values.SHOWN, values.SHOWN + 1):
        for value in (torch.ones(size), [1] * size, (1,) * size):
            assert ("..." in values.argument(value)) == (size > values.SHOWN), "cut where it is longer"


def test_of_what_is_printed_the_beginning_is_kept():
    printed = values.Printed()
    print("begin", file=printed)
    for _ in range(1000):
        print("x" * 1000, file=printed)
    assert printed.getvalue().startswith("begin\nxxx") and printed.getvalue().endswith("\n... (cut here)")
    assert len(printed.getvalue()) < values.MOST_PRINTED + 20


def test_ctrl_c_ends_without_a_traceback(monkeypatch, capfd):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "verdicts", interrupted)
    assert check.main(["01_intro"]) == 1
    said = capfd.readouterr().err.strip()
    assert said and "\n" not in said and "Error" not in said


def test_files_that_replace_functions_of_the_checker_earn_nothing(tmp_path):
    text = SHIFT + "from common.lab import ledger\nledger.Ledger.__torch_dispatch__ = None\n"
    (tmp_path / "at_once.py").write_text(text)
    (verdict,) = check.verdicts("01_intro", tmp_path / "at_once.py", "ring_shift")
    assert verdict.status == "not graded" and "replaces functions" in verdict.got
    late = text.replace("from common", "def global_mean(values):\n    from common").replace("\nledger", "\n    ledger")
    (tmp_path / "late.py").write_text(late)
    verdict = check.verdicts("01_intro", tmp_path / "late.py", "global_mean")[0]
    assert verdict.status == "wrong" and "replaces functions" in verdict.got


def test_outcomes_that_are_missing_are_not_right():
    exercise = check.exercises_of("01_intro")[0]
    for ranks in ([], [[], []], [[engine.CallOutcome("returned")], []]):
        (verdict,) = engine.grade([(exercise, "f")], None, run=lambda file, jobs, size, r=ranks: dict.fromkeys(jobs, r))
        assert verdict.status == "wrong" and verdict.got == "nothing"
