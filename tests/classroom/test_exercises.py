"""What a class is asked in chapters 01 to 03 that nobody has seen: it makes sense, and it is of all sizes."""

import random

import pytest

from common import check

CHAPTERS = ("01_intro", "02_data_parallel", "03_ddp")


def best_times(operations, start, compute, limit):
    return sorted(operations * max(n * start, compute / n) for n in range(1, limit + 1))


# exercise -> smallest and largest of each number that is drawn, and what must hold for each draw
DRAWN = {
    "ring_bytes": ([(0, 8), (2, 9), (1, 5000), (1, 8)], lambda rank, size, elements, itemsize: rank < size),
    "all_reduce_seconds": (
        [None, (2, 32), (10, 5000), (0.5, 3), (4, 20)],
        lambda algorithm, size, *rest: algorithm in ("ring", "tree") or size & (size - 1) == 0,
    ),
    "slice_sizes": ([(1, 200), (2, 9)], lambda batch, devices: True),
    "mean_of_slices": (
        [None, None],
        lambda means, counts: [count > 0 for count in counts] == [mean is not None for mean in means]
        and 0 in counts and sum(map(bool, counts)) > 1,
    ),
    "bytes_held": (
        [(0, 7), (2, 8), (1, 10_000), (1, 10_000), (1, 10_000)], lambda device, devices, *rest: device < devices
    ),
    "bytes_copied": (
        [(2, 8), (1, 10_000), (1, 10_000), (2, 7200), (2, 7200)],
        lambda devices, trainable, frozen, inputs, outputs: inputs % devices == outputs % devices == 0,
    ),
    "best_devices": (
        [(10, 500), (2, 2), (7, 399), (3, 16)], lambda *call: best_times(*call)[0] < best_times(*call)[1]
    ),
    "learning_rate": (
        [(0, 12), (1 / 64, 40 / 64), (256, 256), (512, 8192), (4, 10)], lambda *call: call[3] % 256 == 0
    ),
    "assign_buckets": ([None, (4, 40), (40, 100)], lambda sizes, *caps: all(0 < size <= 80 for size in sizes)),
    "launch_order": (
        [None, None],
        lambda buckets, ready: all(buckets) and sum(buckets, []) == sorted(ready)[::-1] == [*range(len(ready))][::-1],
    ),
    "sampler_indices": ([(5, 40), (0, 9), (0, 99), (0, 5), (2, 6)], lambda *call: call[3] < call[4]),
    "examples_of_step": (
        [(1, 9), (2, 30), (8, 30), (0, 99), (0, 4), (2, 5)],
        lambda step, batch, size, seed, rank, world: batch % world == 0 and rank < world,
    ),
    "speedup_and_efficiency": ([None, (2, 64), (1, 10), (1, 10)], lambda kind, *rest: kind in ("strong", "weak")),
    "overlapped_seconds": (
        [None, None], lambda compute, communicate: 2 <= len(compute) == len(communicate) <= 6 and min(compute) > 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_what_a_class_is_asked_makes_sense(name):
    (draw,) = (d.ARGUMENTS[name] for d in map(fresh_of, CHAPTERS) if name in d.ARGUMENTS)
    ranges, holds = DRAWN[name]
    drawn = random.Random(0)
    calls = [draw(drawn) for _ in range(1000)]
    assert [call for call in calls if not holds(*call)][:1] == [], f"{name}: a call that its text does not allow"
    for place, limits in enumerate(ranges):
        if limits:
            numbers = [call[place] for call in calls]
            least, most = limits
            assert least <= min(numbers) and max(numbers) <= most, f"{name}, argument {place}: not in {limits}"
            spread = max(numbers) - min(numbers)
            assert spread >= 0.95 * (most - least), f"{name}, argument {place}: not all of {limits}"
    words = sorted({call[0] for call in calls if isinstance(call[0], str)})
    assert words == WORDS.get(name, []), f"{name}: what is drawn for its first argument"
    assert [n for n in numbers_in(calls) if 64 * n % 1][:1] == [], f"{name}: what is no multiple of 1/64 is not exact"


WORDS = {"all_reduce_seconds": ["halving-doubling", "ring", "tree"], "speedup_and_efficiency": ["strong", "weak"]}


def numbers_in(value) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers_in(item)]
    return [] if value is None or isinstance(value, str) else [value]


def fresh_of(chapter: str):
    return check.classroom(chapter, "fresh")


def test_what_is_drawn_is_all_that_only_calculates():
    assert {name for chapter in CHAPTERS for name in fresh_of(chapter).ARGUMENTS} == DRAWN.keys()
    drawn = random.Random(0)
    launches = [fresh_of("03_ddp").ARGUMENTS["launch_order"](drawn) for _ in range(20)]
    in_order = [ready == sum(buckets, []) for buckets, ready in launches]
    assert sum(in_order) < 5, "gradients hardly ever get ready in another order than that of the buckets"
    exact = fresh_of("03_ddp").CASES["exact_accuracy"]
    sizes = {examples for _ in range(200) for case in exact(drawn, 4) for _, examples in case.arguments}
    assert sizes == {*range(11, 41)}, "examples of exact_accuracy"
    (case,) = exact(drawn, 4)
    own = [correct.tolist() for correct, _ in case.arguments]
    (examples,) = {examples for _, examples in case.arguments}
    right = [answer for turn in zip(*own, strict=True) for answer in turn][:examples]
    assert 11 <= examples <= 40 and case.expected == [sum(right) / examples] * 4
    assert {len(mine) for mine in own} == {-(-examples // 4)} and 0.2 < case.expected[0] < 0.8
