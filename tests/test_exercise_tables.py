"""What the exercises ask."""

import random
from collections import Counter

from course.pipeline import schedules, simulator
from course.pipeline.classroom import fresh, grading


def test_schedule_to_be_mended_is_not_legal_as_it_is():
    """Those of the table, and those of a class: in the wrong order, or ranks wait for each other."""
    kinds = Counter()
    for case in [*grading.mend(2), *(case for seed in range(20) for case in fresh.mend(random.Random(seed), 2))]:
        given = [schedules.parse(" ".join(actions)) for actions in case.arguments[0][0]]
        try:
            simulator.simulate(given)
            kinds["legal"] += 1
        except simulator.IllegalSchedule as illegal:
            kinds[str(illegal).partition(":")[0]] += 1
    assert kinds.keys() == {"wrong order", "deadlock"}, kinds
