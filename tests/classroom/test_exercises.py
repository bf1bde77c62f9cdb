"""The exercises of chapters 01 to 03: their inputs, their hints, and what a class is asked that nobody has seen.

Inputs are written down here as the last of four ranks gets them (chapter 02: each of two). Those of the exercises that
only calculate stand in the reasons of the wrong answers and in the tables of tests/wrong_answers/.
"""

import random

import pytest

from common import check
from common.grading import values

CHAPTERS = ("01_intro", "02_data_parallel", "03_ddp")
EXERCISES = {exercise.name: exercise for chapter in CHAPTERS for exercise in check.exercises_of(chapter)}
SECOND = {exercise.name for exercise in check.exercises_of("02_data_parallel")}
WEIGHTS = "[0, 1, 2, ...] (100x100 float32)"
# exercise -> (the input in words, the arguments of the last rank)
INPUTS = {
    "ring_shift": [
        ("4 elements", "[4, 4, 4, 4]"),
        ("a float64 matrix of 3 x 2", "[[4, 4], [4, 4], [4, 4]] (3x2 float64)"),
        ("300,000 elements", "[4, 4, 4, ...] (300,000 float32)"),
    ],
    "global_mean": [
        ("1, 3, 4, 2 values on the ranks", "[1000, 2000]"),
        ("2, 2, 2, 2 values on the ranks", "[1000, 2000]"),
        ("3, 0, 1, 0 values on the ranks", "[]"),
    ],
    "all_to_all": [
        ("float32 parts", "[[30, 30, 30], [31, 31, 31, 31], [32], [33, 33]], [4, 2, 4, 2]"),
        ("int64 parts, some empty", "[[] (0 int64), [31] (1 int64), [32, 32] (2 int64), [] (0 int64)], [0, 1, 2, 0]"),
    ],
    "tree_broadcast": [
        ("root 0, 5 elements", "[1000, 1000, 1000, 1000, 1000], 0"),
        ("root 1, 3 elements", "[1000, 1000, 1000] (3 int64), 1"),
        ("root 3, 100000 elements", "[1000, 1000, 1000, ...] (100,000 float32), 3"),
    ],
    "ring_all_gather": [
        ("10 elements", "[9, 10], 10"),
        ("8 elements", "[7, 8], 8"),
        ("2 elements", "[], 2"),
    ],
    "ring_reduce_scatter": [
        ("10 elements", "[1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000]"),
        ("8 elements", "[1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000]"),
        ("2 elements", "[1000, 2000]"),
    ],
    "halving_doubling_all_reduce": [
        ("8 elements", "[1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000]"),
        ("10 elements", "[1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000] (10 float64)"),
        ("3 elements", "[1000, 2000, 3000]"),
        ("1 element", "[1000]"),
    ],
    "mean_of_slices": [
        ("slices of [2, 2]", "[1.0, 3.0], [2, 2]"),
        ("slices of [5, 4]", "[3.0, 7.5], [5, 4]"),
        ("slices of [2, 1, 0]", "[2.0, 5.0, None], [2, 1, 0]"),
    ],
    "add_up": [
        ("two devices", "[[[1, 1], [10, 10]], [[10, 10], [100, 100]]]"),
        ("a parameter that one replica did not use", "[[[1, 1], None], [None, [10, 10]], [[100, 100], [10, 10]]]"),
        ("a parameter that nobody used", "[[[1, 1], None], [[10, 10], None]]"),
        ("one device", "[[[1, 1], None]]"),
    ],
    "gradients_of_copies": [
        ("4 examples on 2 device(s)", "[1, -2], [[-1, 0], [1, -1], [1, -3], [3, 2]] (4x2 float32), [0, 1, 2, 3], 2"),
        ("8 examples on 3 device(s)", "[1, -2], [1, 1, -1, ...] (8x2 float32), [0, 1, 2, 3, 4, 5, 6, 7], 3"),
        ("4 examples on 3 device(s)", "[1, -2], [[2, 1], [-3, -2], [0, -3], [-1, 0]] (4x2 float32), [0, 1, 2, 3], 3"),
        ("2 examples on 1 device(s)", "[1, -2], [[0, 1], [-2, 2]] (2x2 float32), [0, 1], 1"),
    ],
    "running_mean": [
        ("batches of 4 and 3 on 2 device(s), momentum 0.5",
         "[[[0, 1], [2, 3], [50, 60], [70, 80]] (4x2 float32), [[3, -1], [5, 1], [90, 90]] (3x2 float32)], 2, 0.5"),
        ("batches of 4 and 3 on 2 device(s), momentum 1.0",
         "[[[0, 1], [2, 3], [50, 60], [70, 80]] (4x2 float32), [[3, -1], [5, 1], [90, 90]] (3x2 float32)], 2, 1.0"),
        ("batches of 4 and 3 on 4 device(s), momentum 0.5",
         "[[[0, 1], [2, 3], [50, 60], [70, 80]] (4x2 float32), [[3, -1], [5, 1], [90, 90]] (3x2 float32)], 4, 0.5"),
        ("batches of 4 and 3 on 1 device(s), momentum 1.0",
         "[[[0, 1], [2, 3], [50, 60], [70, 80]] (4x2 float32), [[3, -1], [5, 1], [90, 90]] (3x2 float32)], 1, 1.0"),
    ],
    "average_gradients": [
        ("float32 tensors of shapes (2, 3), (), (4,)",
         "[[[1000, 2000, 3000], [4000, 5000, 6000]] (2x3 float32), 7000 (scalar float32), [8000, 9000, 10000, 11000]]"),
        ("float64 tensors of shapes (5,)", "[[1000, 2000, 3000, 4000, 5000] (5 float64)]"),
    ],
    "accumulated_gradient": [
        ("3 micro-batches on each rank",
         "[[[1000, 2000], [3000, 4000]] (2x2 float32), [[2000, 4000], [6000, 8000]] (2x2 float32), "
         "[[3000, 6000], [9000, 12000]] (2x2 float32)]"),
        ("1 micro-batch on each rank", "[[[1000, 2000], [3000, 4000]] (2x2 float32)]"),
    ],
    "clipped_gradients": [
        ("max_norm 2.5", "[[[33], [0]] (2x1 float32), [0, -26, 0]], 2.5"),
        ("max_norm 10.0", "[[[33], [0]] (2x1 float32), [0, -26, 0]], 10.0"),
    ],
    "bf16_average": [
        ("8 elements", "[16, 32, 48, 64, 80, 96, 112, 128]"),
        ("1 + 2**-10 times whole numbers, and 2**127", "[[16.015625], [1.7014118e+38]] (2x1 float32)"),
    ],
    "average_with_unused": [
        ("rank r lacks gradient r", "[[1000, 2000], [3000, 4000], [5000, 6000], None], [(2,), (2,), (2,), (2,)]"),
        ("nobody has gradient 1, rank 0 alone has gradient 2",
         "[[1000, 2000, 3000], None, None, [9000, 10000, 11000, 12000]], [(3,), (2, 2), (), (4,)]"),
    ],
    "exact_accuracy": [
        ("8 examples", "[True, False] (2 bool), 8"),
        ("9 examples", "[True, False, False] (3 bool), 9"),
        ("10 examples", "[True, False, False] (3 bool), 10"),
        ("1 example", "[True] (1 bool), 1"),
    ],
    "uneven_steps": [
        ("2, 2, 2, 2 gradients on the ranks", "[[1000, 2000, 3000, 4000, 5000], [2000, 4000, 6000, 8000, 10000]], 5"),
        ("3, 1, 2, 0 gradients on the ranks", "[], 5"),
        ("0, 2, 1, 2 gradients on the ranks", "[[1000, 2000, 3000, 4000, 5000], [2000, 4000, 6000, 8000, 10000]], 5"),
    ],
    "first_difference": [
        ("all alike", f"[{WEIGHTS}, {WEIGHTS}, {WEIGHTS}]"),
        ("one value of parameter 1 on the last rank", f"[{WEIGHTS}, {WEIGHTS}, {WEIGHTS}]"),
        ("two values of parameter 2 swapped on rank 1", f"[{WEIGHTS}, {WEIGHTS}, {WEIGHTS}]"),
        ("parameter 0 in another shape on the last rank",
         f"[[0, 1, 2, ...] (50x200 float32), {WEIGHTS}, {WEIGHTS}]"),
        ("parameter 1 in another type on rank 0", f"[{WEIGHTS}, {WEIGHTS}, {WEIGHTS}]"),
        ("parameter 2 on rank 0, parameter 1 on rank 1", f"[{WEIGHTS}, {WEIGHTS}, {WEIGHTS}]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_these(name):
    cases = EXERCISES[name].check(2 if name in SECOND else 4)
    calls = [(case.what, values.inputs(case.arguments, name)[-1].partition(f": {name}(")[2][:-1]) for case in cases]
    assert calls == INPUTS[name], f"inputs of {name}"


# exercise -> what its hint says that would mislead if it were otherwise
HINTS = {
    "ring_shift": ["first waits until its message is taken, nobody is left to take one", "isend starts a send",
                   "wait for it after the receive", "has the shape and type of what comes"],
    "global_mean": ["one value as much as a rank with a thousand", "Sums can be added, and so can counts"],
    "ring_bytes": ["two phases a rank sends every chunk but one", "keep to itself in the reduce-scatter",
                   "right neighbour already have in the all-gather"],
    "all_reduce_seconds": ["Add latency + bytes / bandwidth for each", "the sizes are n/2, n/4, ..., and back again"],
    "all_to_all": ["all receives and all sends without waiting (irecv, isend), then wait for every one",
                   "own part needs no message"],
    "tree_broadcast": ["place = (rank - root) % size", "distance d = 1, 2, 4, ... the places below d have the tensor",
                       "place p sends to place p + d if there is one"],
    "ring_all_gather": ["In step s a rank sends chunk (rank - s) % size and receives chunk (rank - s - 1) % size",
                        "tensor_split of an empty result gives views"],
    "ring_reduce_scatter": ["Start with chunk (rank - 1) % size; always send next the chunk that you have just added",
                            "Work on a copy"],
    "halving_doubling_all_reduce": ["two numbers, low and high", "partner with the smaller rank keeps the first half",
                                    "the way back is the same list in reverse"],
    "slice_sizes": ["All slices but the last have the same length", "divided by the devices and rounded up",
                    "Nine examples on four devices are three slices"],
    "mean_of_slices": ["the mean times the number of its examples", "Leave out what has none"],
    "add_up": ["zip(*gradients) gives the gradients of one parameter from all devices",
               "`total += gradient` writes into a tensor that may be one of the arguments"],
    "gradients_of_copies": ["weight.clone().requires_grad_()", "slice by slice, join them with torch.cat, take one",
                            "torch.autograd.grad for the gradients of all copies at once"],
    "apply_in_threads": ["as many workers as there are functions", "Catch the exception inside the thread",
                         "`with torch.set_grad_enabled(recording):` belongs in there, too"],
    "running_mean": ["batch.chunk(devices)[0] is all that the first replica sees"],
    "bytes_held": ["Device 0 has the parameters once, not twice", "table of section 5 for the moment after the loss"],
    "bytes_copied": ["Five things travel: parameters out, gradients back, inputs out, outputs back, and one more on "
                     "the way back", "device 0's own share stays at home"],
    "best_devices": ["starts devices * operations operations; a device computes all operations, each of them on its "
                     "slice", "the larger of the two times", "then the number with the least"],
    "average_gradients": ["torch.cat of all tensors, each as reshape(-1), is the flat tensor",
                          "split cuts it again, and view_as gives each piece its shape back"],
    "accumulated_gradient": ["Gradients add up locally, at no cost", "mean over all micro-batches of all ranks"],
    "learning_rate": ["the one at step 0 and the scaled one", "from the first to the second by the fraction step / "
                      "warmup, never further", "mind a warm-up of no steps"],
    "assign_buckets": ["reversed(range(len(sizes)))", "whether the bucket is full before you add to it",
                       "never an empty one at the end"],
    "launch_order": ["the number of the next bucket to launch, and the set of gradients that are there",
                     "launch while, not if, that next bucket is complete"],
    "clipped_gradients": ["average first", "every rank has the whole gradient and can take its norm without a message"],
    "bf16_average": ["float16 has half the bytes too, but ends at 65504", "overflows where the sum of their shares "
                     "does not", "travels as bfloat16 and is returned as float32"],
    "average_with_unused": ["A rank without a gradient must still take part",
                            "Add up the bitmaps: an element of 0 says that no rank has that gradient"],
    "first_difference": ["zlib.crc32 makes a number out of bytes (tensor.numpy().tobytes())",
                         "shape and type can be put into it as text", "Gather everybody's numbers"],
    "sampler_indices": ["as long as the next multiple of world first", "then take every world-th place of it, from "
                        "place rank on"],
    "exact_accuracy": ["Place k of rank r is place k * world + r of the list", "Accuracies of ranks are not to be "
                       "averaged; numbers of right answers can be added"],
    "examples_of_step": ["begins at step * batch + rank * (batch // world)",
                         "Place p is place p % size of epoch p // size"],
    "uneven_steps": ["A rank that has run out still takes part, with zeros", "1 from a rank that has one, 0 from the "
                     "others", "what if it is 0?"],
    "speedup_and_efficiency": ["Count examples per second on both sides",
                               "In weak scaling a step of 4 ranks has 4 times as many examples"],
    "overlapped_seconds": ["when the computation of this bucket ends, and when the network is free",
                           "starts at the later of the two"],
}  # fmt: skip


def test_hints_say_what_helps():
    assert HINTS.keys() == EXERCISES.keys()
    lacks = [(name, words) for name in HINTS for words in HINTS[name] if words not in EXERCISES[name].hint]
    assert lacks == [], "hints that do not say these words any more"


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
