"""What a learner reads: the table of verdicts, what is wrong with an answer, hints in stages."""

import re
import textwrap

from common.grading.engine import Exercise, Verdict


def table(results: list[Verdict], drawings: bool = True, minutes: dict[str, str] | None = None) -> str:
    """The verdicts as text: a line for each exercise, and below them what is wrong; with `drawings` also what the
    answer does, drawn in text where the exercise has a drawing; `minutes` are what each allows, for a column of
    their own."""
    width = max(len(name) for name in ("exercise", *(result.exercise.name for result in results)))
    column = "  minutes" if minutes else ""

    def row(name, difficulty, allowed, status, points):
        return f"{name:{width}}  {difficulty:10}{f'  {allowed:>7}' if minutes else ''}  {status:13}  {points}"

    lines = [f"{'exercise':{width}}  difficulty{column}  {'status':13}  points"]
    for result in results:
        exercise, points = result.exercise, f"{result.points:>2} of {result.exercise.points}"
        allowed = (minutes or {}).get(exercise.name, "")
        lines.append(row(exercise.name, exercise.difficulty, allowed, result.status, points))
    total, possible = sum(result.points for result in results), sum(result.exercise.points for result in results)
    right = f"{sum(result.status == 'right' for result in results)} of {len(results)} right"
    lines.append(row("total", "", "", right, f"{total:>2} of {possible}"))
    if results[0].status == "not graded":
        return "\n".join([*lines, "", f"the file could not be used: {results[0].got}"])
    for result in results:
        if result.status == "wrong":
            lines += ["", *explained(result, drawings)]
        elif len(results) == 1 and result.printed:
            lines += ["", *column_of("printed", result.printed)]
    following = next((result.exercise for result in results if result.status == "not attempted"), None)
    if following:
        lines += ["", f"next: {following.name} {following.difficulty}"]
    return "\n".join(lines)


def explained(result: Verdict, drawings: bool = True) -> list[str]:
    """What is wrong with an answer: where, with which input, what was expected, what came, what it printed."""
    lines = [f"{result.exercise.name}: {result.where}"]
    lines += column_of("input", result.inputs)
    lines += [f"  expected  {result.expected}", f"  got       {result.got}"]
    lines += column_of("why", tuple(textwrap.wrap(result.why, 100)))
    lines += column_of("printed", result.printed)
    lines.append(f"  hint      python -m common.check {result.exercise.name} --hint")
    if drawings and result.drawing:
        lines += ["", *(f"  {line}" for line in result.drawing.text.splitlines())]
    return lines


def column_of(title: str, lines: tuple[str, ...], most: int = 12) -> list[str]:
    """Lines with a title beside the first; of more than `most` the first ones."""
    shown = [*lines[:most], *([f"... and {len(lines) - most} lines more"] if len(lines) > most else [])]
    return [f"  {title if number == 0 else '':8}  {line}" for number, line in enumerate(shown)]


def stages(exercise: Exercise) -> list[str]:
    """An exercise's hint in stages: its sentences, each of which says more than those before it."""
    return re.split(r"(?<=[.?!:]) (?=[A-Z`0-9])", exercise.hint)


def bar(done: int, of: int, width: int = 30) -> str:
    """Progress through a chapter: [######......] 3 of 9."""
    full = width * done // of
    return f"[{'#' * full}{'.' * (width - full)}] {done} of {of}"
