"""The schedule game: its rules say what the simulator says, par is the shortest time, and what is drawn trains."""

import itertools
import os
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.lab.launch import launch
from course.pipeline import fastest, game, game_page, play, schedules, simulator, toy

DRAWN = 200 if os.environ.get("FULL") else 5  # schedules that train on real ranks
LEVELS = st.sampled_from(game.LEVELS)


def drawn(level, choose):
    """A whole schedule of what is ready, one action after the other; None where memory leaves none to go on with."""
    lists = [[] for _ in range(level.ranks)]
    while any(open_ := game.ready(level, lists)):
        can = [(rank, action) for rank, own in enumerate(open_) for action, why in own.items() if not why]
        if not can:
            return None
        rank, action = choose(can)
        lists[rank].append(action)
        timeline = game.play(level, lists)
        assert sum(map(len, timeline.ranks)) == sum(map(len, lists)), "what is ready can be played"
    return lists


def gathers(own):
    """How often a rank comes to a stage: with one stage's parameters at a time, each time it gathers."""
    return len([*itertools.groupby(action.stage for action in own)])


@settings(max_examples=200 if os.environ.get("FULL") else 40, deadline=None)
@given(LEVELS, st.randoms(use_true_random=False))
def test_what_is_ready_makes_a_schedule_that_the_simulator_runs_and_none_is_below_par(level, draw):
    lists = drawn(level, draw.choice)
    if lists is None:
        assert level.most is not None or level.gathers is not None
        return
    found, timeline = game.judge(level, lists), simulator.simulate(lists, game.TIMES)
    assert found["whole"] and found["makespan"] == timeline.makespan >= level.par
    assert level.most is None or max(timeline.peaks) <= level.most
    assert level.gathers is None or max(map(gathers, lists)) <= level.gathers
    until = draw.randint(1, int(timeline.makespan))
    part = [[action for start, _, action in own if start < until] for own in timeline.ranks]
    for shown in (found, game.judge(level, part)):
        busy = sum(end - start for own in shown["events"] for start, end, _ in own)
        idle = sum(end - start for rank, start, end, _ in shown["idle"])
        assert busy + idle == level.ranks * max(shown["makespan"], level.par), "each time of waiting has its reason"


@pytest.mark.parametrize("level", game.LEVELS, ids=lambda level: level.name)
def test_par_is_reached_and_nothing_is_shorter(level):
    lists = [schedules.parse(text) for text in game.stored()[level.name]["lists"]]
    timeline = simulator.simulate(lists, game.TIMES)
    assert timeline.makespan == level.par and (level.most is None or max(timeline.peaks) <= level.most)
    assert level.gathers is None or max(map(gathers, lists)) <= level.gathers
    start, search = ((0, 0),) * level.microbatches, fastest.Search(level)
    assert search.within(start, level.par - 1) is None, "write levels.json with `python -m course.pipeline.fastest`"
    assert search.within(start, level.par) is not None


def test_named_schedules_are_recognised_where_the_level_allows_them_and_none_is_shorter_than_par():
    seen = set()
    for level in game.LEVELS:
        for name in schedules.SCHEDULES:
            try:
                known = schedules.build(name, level.ranks, level.microbatches, level.stages)
            except UserError:
                continue
            if simulator.placement(known) != level.rank_of:
                continue
            legal = not game.judge(level, known)["wrong"]
            other = [[action._replace(microbatch=level.microbatches - 1 - action.microbatch) for action in own]
                     for own in known]  # fmt: skip
            begun = [own[:1] for own in known]
            for lists in (known, other, begun):
                assert (name in game.names(level, lists)) == legal, f"{name} in {level.name}"
            if legal:
                seen.add(name)
                assert simulator.simulate(known, game.TIMES).makespan >= level.par
    assert seen >= {"gpipe", "1f1b", "zb-h1", "interleaved", "zbv"}


def test_who_is_stuck_is_told_what_for_and_the_way_on():
    """By the limit of gathers nothing can come next; and above par the level is offered anew before the next one."""
    level = game.level("beside FSDP")
    found = game.judge(level, lists := [schedules.parse(f"{a}F0 {a}F1 {a}F2 {a}F3 {b}F0 {b}F1 {b}F2 {b}F3 {b}B0 {a}B0")
                                        for a, b in ((0, 2), (1, 3))])  # fmt: skip
    assert not any(not why for own in found["ready"] for why in own.values()) and not found["whole"]
    shown = game_page.html(level, found)
    assert "Nothing can come next: rank 1 has gathered parameters 3 times" in shown
    assert "Nothing can come next" not in game_page.html(level, game.judge(level, [own[:-1] for own in lists]))
    level = game.level("no room")
    slow = [schedules.parse(text) for text in ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3")]
    best = [schedules.parse(text) for text in game.stored()[level.name]["lists"]]
    assert ["Try again" in game_page.html(level, game.judge(level, one)) for one in (slow, best)] == [True, False]


@pytest.mark.parametrize(
    "lists, named",
    [
        (["0F0 0F1 0B0 0B1", "1F1 1B1 1B0 1F0"], "rank 1 does 1B0 before 1F0"),
        (
            ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
            "rank 0 waits at 0B0 for 1B0 .* rank 1 waits at 1F1 for 0F1 of rank 0",
        ),
        (["0F0 0B0", "1F0"], "rank 0 waits at 0B0 for 1B0 of rank 1, which is placed nowhere"),
        (["0F0 0F0"], "twice: 0F0"),
        (["1F0"], "'1F0' is no action of rank 0"),
    ],
)
def test_what_cannot_run_is_named(lists, named):
    with pytest.raises(UserError, match=named):
        game.play(game.LEVELS[0], [schedules.parse(text) for text in [*lists, ""][:2]])


def test_a_rank_that_stores_too_much_is_named():
    level = game.level("no room")
    found = game.judge(level, [schedules.parse("0F0 0F1 0F2"), []])
    assert "rank 0 stores 3" in found["wrong"] and not found["whole"]


def test_fewer_gathers_cost_time_or_memory():
    """Beside FSDP the interleaved order is refused; and by search, less memory takes more gathers."""
    level = game.level("beside FSDP")
    known = {name: schedules.build(name, 2, 4, 2) for name in ("interleaved", "looped-bfs")}
    assert "rank 0 gathers 11 times, and may gather 3" in game.judge(level, known["interleaved"])["wrong"]
    assert game.judge(level, known["looped-bfs"])["gathered"] == [3, 3] and level.par == 27
    memory = game.level("gathers for memory")
    fewer, units = replace(memory, gathers=memory.gathers - 1), [27, 36]
    assert [fastest.fastest(one)[0] for one in (memory, fewer)] == units


def test_a_schedule_that_is_played_takes_at_least_the_time_that_the_simulator_says(capsys):
    """1F1B of two micro-batches on two ranks: nine units, of which each rank is idle for three."""
    play.main(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    equal, slept = capsys.readouterr().out.splitlines()
    assert float(equal.split()[-1]) < toy.ALLOWED
    ran, said, idle, bubble = map(float, re.findall(r"[\d.]+(?= s|%)", slept))
    assert (said, bubble) == (pytest.approx(9 * play.UNIT, abs=0.005), 33) and said - 0.01 <= ran and 0 < idle < 100


def steps(many):
    return [play.step(lists) for lists in many]


def test_random_schedules_train_as_one_process(capsys):
    draw, many = random.Random(5), {}
    while sum(map(len, many.values())) < DRAWN:
        level = draw.choice(game.LEVELS)
        if lists := drawn(level, draw.choice):
            many.setdefault(level.ranks, []).append(lists)
    for ranks, own in many.items():
        found = launch(steps, nproc=ranks, args=(own,), timeout=600)
        for place, lists in enumerate(own):
            toy.compare("drawn", [of_rank[place] for of_rank in found])
            line = capsys.readouterr().out
            assert float(line.split()[-1]) < toy.ALLOWED and "1.0000 times" in line, f"{lists}: {line}"
