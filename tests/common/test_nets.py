"""Which net catches which mistake: the page says what the rows say, the rows are what the nets say, none is missing."""

import importlib

from helpers import FULL

from course.ddp.catalogue import mistakes
from course.fsdp.museum import incidents
from tools import nets, nets_page
from tools.nets_sought import SOUGHT

COMMAND = "python -m tools.nets --rows NAME writes it"


def test_the_page_says_what_the_rows_say():
    assert nets_page.page(nets_page.read()) == nets_page.PAGE.read_text(), "python -m tools.nets --page writes it"


def test_every_mistake_has_a_row():
    there = {(row["chapter"], row["mistake"]) for row in nets_page.read()}
    for chapter in nets.CHAPTERS:
        bugs = importlib.import_module(f"course.{chapter}.classroom.bugs")
        planted = [*bugs.BUGS, *getattr(bugs, "DROPOUT_BUGS", ()), "faulty.py"]
        assert {(chapter, name) for name in planted} <= there, COMMAND
    others = {"museum": incidents(), "catalogue": mistakes(), "sought": SOUGHT}
    assert {(group, name) for group, names in others.items() for name in names} <= there, COMMAND


def test_rows_are_what_the_nets_say():
    """An incident; with FULL=1 a class of chapter 04 with what is planted in it, too."""
    stored = {tuple(row[key] for key in nets_page.KEY): row for row in nets_page.read()}
    for group in ("museum tied_apart", *["SequenceParallel"] * FULL):
        rows = [nets.as_text(row) for row in nets.all_rows(group)]
        assert len(rows) > 1
        for row in rows:
            expected = stored[tuple(row[key] for key in nets_page.KEY)]
            nothing = row["types"] == "-" != expected["types"]  # no type checker here: an option of the course
            for net in list(nets_page.NETS)[nothing:]:
                assert row[net] == expected[net], f"{row['mistake']}, {net}"
