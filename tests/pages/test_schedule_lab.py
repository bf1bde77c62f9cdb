"""The sliders of chapter 05 redraw the picture, and say why where they cannot; its flipbook says who waits for what."""

import re

import pytest
import torch

from course.pipeline import lab, pictures, schedules, simulator, toy


@pytest.fixture
def sliders():
    return lab.Lab()


def test_times_are_those_of_a_rank_whatever_its_stages(sliders):
    plain, two = lab.run("1f1b", 4, 8), lab.run("interleaved", 4, 8, 2)
    assert plain.makespan == 3 * (8 + 3) and two.makespan == 3 * 8 + 3 * 3 / 2
    for said in (lab.caption("1f1b", plain), sliders.text.value):
        assert all(word in said for word in ("1f1b", "33", "27%")), said
    assert "4, 3, 2, 1" in sliders.text.value, "activations that each rank stores"


def test_what_is_shown_has_no_number_that_changes(sliders, monkeypatch):
    shown = []
    monkeypatch.setattr("common.lab.sliders.display", lambda data, metadata, raw: shown.append((data, metadata)))
    sliders.show("what it shows")
    ((data, metadata),) = shown
    assert data.pop("application/vnd.jupyter.widget-view+json")["model_id"] == sliders.model_id
    assert data.keys() == {"text/plain", "image/png"} and sliders.model_id not in data["text/plain"]
    assert metadata["image/png"]["alt"] == "what it shows"


def test_messages_in_a_common_order_never_wait_for_ever():
    """Also where each send and receive waits for its counterpart; and none does when nothing waits for messages."""
    for name in ("gpipe", "1f1b"):
        for m in (1, 2, 5):
            full = simulator.with_messages(schedules.build(name, 2, m))
            for blocking in (True, False):
                last = pictures.moments(full, blocking)[-1]
                assert last.done == [len(actions) for actions in full] and not last.stuck, (name, m, blocking)


def test_two_ranks_that_send_to_each_other_are_shown_stuck():
    lists = [
        schedules.parse(f"{rank}F0 {rank}SEND_{kind}0 {rank}RECV_{other}0")
        for rank, kind, other in ((0, "F", "B"), (1, "B", "F"))
    ]
    blocked, free = pictures.moments(lists, blocking=True)[-1], pictures.moments(lists, blocking=False)[-1]
    assert blocked.stuck and blocked.done == [1, 1] and all("waits in send" in words for words in blocked.words)
    assert not free.stuck and free.done == [3, 3]


def test_a_schedule_of_ones_own_is_judged(capsys):
    lab.judge("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.findall(r"\d+", last)[:2] == ["6", "6"], "it is done after 6 units, and so is 1F1B"
    lab.judge("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert "deadlock" in capsys.readouterr().out


def test_parts_of_the_pages_model_are_the_model():
    whole = dict(toy.make_model().named_parameters())
    for stages in (1, 2, 3, 8):
        parts = {name: p for stage in range(stages) for name, p in toy.part(stage, stages).named_parameters()}
        assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
