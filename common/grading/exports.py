"""Grades for the platforms that classes use, each in the form that its documentation asks for.

Canvas      Gradebook > Import. Instructure, "How do I import grades in the Gradebook?": columns Student, ID, SIS User
            ID, SIS Login ID, Section, one per assignment; the row "Points Possible" gives its maximum. A student is
            found by any of the identifiers.
Moodle      Grades > Import > CSV file. https://docs.moodle.org/405/en/Grade_import: one column that identifies the
            user, which the teacher maps; a grade; feedback, which has to come together with the grade.
GitHub      GitHub Classroom, the environment variable NAME_RESULTS of its reporter, in base64:
            github.com/classroom-resources/autograding-grading-reporter, src/main.js and src/notify-classroom.js.
Gradescope  results/results.json: https://gradescope-autograders.readthedocs.io/en/latest/specs/, "Output format". It is
            written in a container that Gradescope starts for each submission, so the folder is an autograder that
            hands out what has been graded here, and runs nothing of the submission.
"""

import csv
import json
from pathlib import Path

from common.grading.classes import Graded, indented, make_folder, page_of, safe, shown
from common.grading.engine import Exercise

SETUP = """#!/usr/bin/env bash
apt-get update && apt-get install -y python3
"""
# In /autograder. Which submission it is stands in submission_metadata.json, of the same documentation; names in it are
# not asked, since who submits may have chosen them.
RUN = """#!/usr/bin/env python3
import json
import pathlib

number = json.loads(pathlib.Path("submission_metadata.json").read_text())["id"]
folders = [pathlib.Path("source", name, "results.json") for name in (f"submission_{number}", str(number))]
found = [file.read_text() for file in folders if file.is_file()]
nothing = {"score": 0, "output": f"There is no result for submission {number} yet."}
pathlib.Path("results", "results.json").write_text(found[0] if found else json.dumps(nothing))
"""


def write_all(folder: Path, chapter: str, exercises: list[Exercise], rows: list[Graded]) -> None:
    """canvas.csv, moodle.csv, github/NAME.json, and the autograder gradescope. Raises UserError."""
    make_folder("--export", folder)
    possible, title = sum(exercise.points for exercise in exercises), f"{chapter} exercises"
    canvas: list[list] = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", title]]
    canvas += [["    Points Possible", "", "", "", "", possible]]
    canvas += [[safe(row.name), "", "", safe(row.name), "", row.points] for row in rows]
    moodle: list[list] = [["username", title, f"{title} (feedback)"]]
    moodle += [[safe(row.name), row.points, safe(row.note)] for row in rows]
    for name, lines in (("canvas.csv", canvas), ("moodle.csv", moodle)):
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(lines)
    taken: set[str] = set()
    for row in rows:
        name = page_of(row.name, taken)
        for path, content in ((f"github/{name}.json", github(exercises, row)),
                              (f"gradescope/{name}/results.json", gradescope(exercises, row))):  # fmt: skip
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, text in (("setup.sh", SETUP), ("run_autograder", RUN)):
        (folder / "gradescope").mkdir(exist_ok=True)
        (folder / "gradescope" / name).write_text(text)
        (folder / "gradescope" / name).chmod(0o755)


def _each(exercises: list[Exercise], row: Graded):
    """(exercise, status, points, words) of each."""
    if isinstance(row.results, str):
        return [(exercise, "not graded", 0, row.results) for exercise in exercises]
    return [(r.exercise, r.status, r.points, r.got if r.status == "not graded" else r.text * (r.status == "wrong"))
            for r in row.results]  # fmt: skip


def github(exercises: list[Exercise], row: Graded) -> dict:
    names = {"right": "pass", "not graded": "error"}
    tests = [
        {"name": exercise.name, "status": names.get(status, "fail"), "score": points, "message": shown(words) or status,
         "test_code": f"python -m common.check {exercise.name}", "filename": "", "line_no": 0, "execution_time": 0}
        for exercise, status, points, words in _each(exercises, row)
    ]  # fmt: skip
    found = {test["status"] for test in tests}
    status = "error" if "error" in found else "fail" if "fail" in found else "pass"
    return {"version": 1, "status": status, "max_score": sum(exercise.points for exercise in exercises), "tests": tests}


def gradescope(exercises: list[Exercise], row: Graded) -> dict:
    tests = [
        {"name": exercise.name, "number": str(number), "score": points, "max_score": exercise.points,
         "status": "passed" if status == "right" else "failed", "output": shown(words) or status,
         "output_format": "text", "visibility": "visible"}
        for number, (exercise, status, points, words) in enumerate(_each(exercises, row), start=1)
    ]  # fmt: skip
    return {"output": indented(row.remark) if row.remark else "", "stdout_visibility": "hidden", "tests": tests}
