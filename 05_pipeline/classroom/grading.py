"""How the exercises of chapter 05 are graded: the table EXERCISES at the end, and the checks that it names.

A check is given a world size and yields cases: the arguments of each rank, what each must return, and a pattern that
looks at the messages (common/grading/patterns.py). Schedules are judged by what the simulator makes of them: `budget`.
Other expected values come from whole tensors, from formulas, or were worked out by hand.
"""

import functools
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import torch

from common.errors import UserError
from common.grading.engine import Drawing, ExerciseCase, Wrong, exercise
from common.grading.patterns import calculated, exactly, nothing_sent
from common.lab import plotting
from course.pipeline import schedules, simulator

Timeline, Times, simulate = simulator.Timeline, simulator.Times, simulator.simulate
UNIT = Times(1, Fraction(1, 2), Fraction(1, 2))  # forward and backward take one unit each


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- schedules ------------------------------------------------------------------------------------------------


def text_of(schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule]


def read(value, ranks: int):
    """A learner's schedule. Actions may be text, one by one or many in one, or (stage, kind, micro-batch)."""
    if not isinstance(value, list) or len(value) != ranks:
        got = f"{len(value)} items" if isinstance(value, list) else f"{type(value).__name__} {str(value)[:60]}"
        raise Wrong(f"a list with the actions of each of {ranks} ranks", got)
    read = []
    for actions in value:
        words = actions if isinstance(actions, list) else [actions]
        words = ["".join(map(str, word)) if isinstance(word, list) else str(word) for word in words]
        try:
            read.append(schedules.parse(" ".join(words)))
        except UserError as error:
            raise Wrong("actions such as 2F0", str(error)) from None
    return read


def drawing(timeline: Timeline, title: str) -> Drawing | None:
    if not any(timeline.ranks):
        return None  # stuck before it began
    alt = f"Timeline of your schedule, a row of numbered boxes for each rank: {title}"
    return Drawing(simulator.rows(timeline), lambda: plotting.pipeline({title: timeline}), alt)


def simulated(schedule, times: Times = UNIT) -> Timeline:
    try:
        return simulate(schedule, times)
    except simulator.IllegalSchedule as error:
        until_stuck = drawing(error.so_far, "until it got stuck") if error.so_far else None
        raise Wrong("a legal schedule", str(error), drawing=until_stuck) from None


def budget(span: int, stored: list[int], ranks: int, microbatches: int, kinds: str = "FB", stages: int | None = None,
           times: Times = UNIT, also=None):  # fmt: skip
    """The judge of a schedule with these numbers and kinds of actions, stages placed in a loop. It must be legal, not
    take longer than `span`, and not store more than `stored` on the ranks. also: called with the schedule first."""
    stages = stages or ranks
    due = [
        Counter((s, k, m) for s in range(rank, stages, ranks) for k in kinds for m in range(microbatches))
        for rank in range(ranks)
    ]

    def judge(value):
        schedule = read(value, ranks)
        for rank, (actions, want) in enumerate(zip(schedule, due, strict=True)):
            for these, those, words in ((want, Counter(actions), "does not"), (Counter(actions), want, "should not")):
                if left := these - those:
                    action = schedules.Action(*min(left))
                    others = Counter(actions) - want if words == "does not" else Counter()
                    instead = f", but {schedules.Action(*min(others))}" if others else ""
                    what = f"{'each action once' if action in want else 'these stages, kinds and micro-batches only'}"
                    raise Wrong(f"{what} on rank {rank}", f"rank {rank} {words} do {action}{instead}")
        if also:
            also(schedule)
        timeline = simulated(schedule, times)
        drawn = drawing(timeline, f"makespan {timeline.makespan}, at most {max(timeline.peaks)} stored")
        if any(got > most for got, most in zip(timeline.peaks, stored, strict=True)):
            raise Wrong(f"at most {stored} activations stored on the ranks", str(timeline.peaks), drawing=drawn)
        if timeline.makespan > span:
            raise Wrong(f"a makespan of at most {span}", str(timeline.makespan), drawing=drawn)

    return judge


def judged(size: int, name: str, rows: list[tuple]):
    """Cases that only calculate, from rows of arguments and, last, the judge; schedules are not shown in full."""
    if size == 2:
        for *arguments, judge in rows:
            shown = ", ".join("..." if isinstance(argument, list) else str(argument) for argument in arguments)
            yield ExerciseCase(f"{name}({shown})", [tuple(arguments)] * size, [judge] * size, nothing_sent)


# --- from idle devices to 1F1B -------------------------------------------------------------------


def microbatches_for(size):
    """(p-1) / (v m + p-1) <= b where m >= (p-1) (1-b) / (b v): for the first row 3 * 0.9 / 0.1 = 27."""
    rows = [(4, 1, 10, 27), (4, 1, 20, 12), (4, 2, 10, 14), (8, 1, 5, 133), (8, 4, 7, 24), (2, 1, 60, 1), (1, 1, 5, 1)]
    yield from calculated(size, "microbatches_for", rows)


def one_forward_one_backward(size, shapes=((4, 8), (3, 3), (2, 5), (4, 2))):
    """A message down and one back for each of the p - 1 ranks that follow: 4 (p - 1) units until the first backward."""
    slow = Times(1, Fraction(1, 2), Fraction(1, 2), communication=1)
    rows = []
    for p, m in shapes:
        rows.append((p, m, budget(2 * m + 4 * (p - 1), [2 * (p - r) - 1 for r in range(p)], p, m, times=slow)))
    yield from judged(size, "one_forward_one_backward", rows)


def short_of_memory(size, rows=((4, 8, 2, 34), (4, 8, 3, 26), (3, 7, 2, 24), (4, 8, 1, 64))):
    """The makespans are the least that there are: an exhaustive search over all schedules found no shorter one."""
    rows = [(p, m, limit, budget(span, [limit] * p, p, m)) for p, m, limit, span in rows]
    yield from judged(size, "short_of_memory", rows)


def neighbours(size):
    for rows in (400, 300):
        shape = (rows, 1000)
        sent = [[torch.full(shape, 10.0 * rank + kind) for kind in (1, 2)] for rank in range(size)]
        arguments, expected, messages = [], [], []
        for rank in range(size):
            first, last = rank == 0, rank == size - 1
            arguments.append((None if last else sent[rank][0], None if first else sent[rank][1]))
            expected.append([None if first else sent[rank - 1][0], None if last else sent[rank + 1][1]])
            messages.append([(peer, rows * 4000) for peer in (rank - 1, rank + 1) if 0 <= peer < size])
        yield ExerciseCase(f"tensors of {rows} x 1000", arguments, expected, exactly(messages, any_order=True))


def repaired_step(size):
    for microbatches, each, features in ((1, 3, 2), (4, 2, 3), (3, 1, 2)):
        batch = microbatches * each
        widths = [features + rank % 2 for rank in range(size + 1)]
        weights = [normal(rank, n, m).requires_grad_() for rank, (n, m) in enumerate(pairwise(widths))]
        biases = [normal(30 + rank, m).requires_grad_() for rank, m in enumerate(widths[1:])]
        inputs, targets = normal(11, batch, widths[0]), normal(12, batch, widths[-1])
        x = inputs
        for weight, bias in zip(weights, biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        loss = (x - targets).square().mean()
        of_weights, of_biases = (torch.autograd.grad(loss, many, retain_graph=True) for many in (weights, biases))
        arguments = [
            (weight.detach(), bias.detach(), inputs if rank == 0 else None, targets if rank == size - 1 else None,
             batch, microbatches) for rank, (weight, bias) in enumerate(zip(weights, biases, strict=True))
        ]  # fmt: skip
        messages = [
            [(rank + 1, 8 * each * widths[rank + 1])] * (microbatches * (rank < size - 1))
            + [(rank - 1, 8 * each * widths[rank])] * (microbatches * (rank > 0))
            for rank in range(size)
        ]
        expected = [list(pair) for pair in zip(of_weights, of_biases, strict=True)]
        what = f"batch {batch}, {microbatches} micro-batch{'es' * (microbatches > 1)}"
        yield ExerciseCase(what, arguments, expected, exactly(messages, any_order=True))


# --- the schedule lab ----------------------------------------------------------------------------


def peak_megabytes(size):
    """In the first row 1 + 1 + 1, minus one, plus one. With I and W apart, an activation is held until W is over; in
    the fourth row 10 + 3 + 10, then 10 less and 10 more."""
    rows = [
        (["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"], {0: 1}, 3),
        (["3F0", "3F1", "3I0", "3F2", "3I1", "3I2", "3W0", "3W1", "3W2"], {3: 7}, 21),
        (["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"], {0: 4}, 4),
        (["1F0", "2F0", "1F1", "1I0", "1W0", "1F2", "2B0", "1B1", "1B2"], {1: 10, 2: 3}, 23),
        (["0F0", "5F0", "5B0", "0F1", "0B0", "5F1", "5B1", "0B1"], {0: 2, 5: 9}, 11),
        (["1F10", "12F0", "12B0", "12F10", "12B10", "1B10"], {1: 2, 12: 3}, 5),
    ]
    yield from calculated(size, "peak_megabytes", rows)


def makespan(size):
    """Worked out by hand where there are two ranks; otherwise by formula: 2 (m+p-1) units of 1F1B."""
    waits = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    stuck = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    both_ahead = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1", "1B0"]]
    v = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    rows = [
        (text_of(schedules.build("1f1b", 4, 8)), 1, 1, 0, 22),
        (waits, 1, 2, 0, 12),  # one micro-batch after the other: 2 (1+1+2+2)
        (waits, 1, 2, 5, 32),  # and two messages for each
        (both_ahead, 1, 2, 0, 11),  # rank 1: 1-3 forward, 3-5 1B1, 5-7 1B0; rank 0: 7-9 and 9-11
        (v, 1, 2, 10, 4 + 8 + 40),  # two messages forward and two back; none where the V turns
        (stuck, 1, 1, 0, None),
        (text_of(schedules.build("gpipe", 3, 4)), 2, 3, 0, 5 * 6),
        ([["0B0", "0F0"], ["1F0", "1B0"]], 1, 1, 0, None),
    ]
    if size == 2:
        for *arguments, expected in rows:
            what = f"makespan({arguments[0] if len(arguments[0]) == 2 else '...'}, {str(arguments[1:])[1:-1]})"
            yield ExerciseCase(what, [tuple(arguments)] * size, [expected] * size, nothing_sent)


def interleave(size, shapes=((4, 8, 2), (2, 4, 3), (3, 3, 2), (2, 2, 2))):
    rows = []
    for p, m, v in shapes:
        stored = [(v - 1) * p + p - rank for rank in range(p)]
        rows.append((p, m, v, budget(2 * (v * m + p - 1), stored, p, m, stages=v * p)))
    yield from judged(size, "interleave", rows)


SWAPPED = (
    ("1f1b", 2, 2, 1, 0),  # backward before forward
    ("1f1b", 4, 3, 0, 2),  # 0B0 before 0F2: rank 0 waits for 1B0, before which rank 1 waits for 0F2
    ("zb-h1", 3, 4, 0, 3),  # 0W0 before 0I0
    ("1f1b", 4, 4, 3, 6),
)


def mend(size, swapped=SWAPPED):
    rows = []
    for name, p, m, rank, place in swapped:
        right = schedules.build(name, p, m)
        given = [list(actions) for actions in right]
        given[rank][place : place + 2] = given[rank][place : place + 2][::-1]

        def one_swap(value, given=given, p=p):
            schedule = read(value, p)
            changed = [
                (rank, place)
                for rank, (old, new) in enumerate(zip(given, schedule, strict=True))
                for place in range(max(len(old), len(new)))
                if old[place : place + 1] != new[place : place + 1]
            ]
            swapped = len(changed) == 2 and changed[0][0] == changed[1][0] and changed[1][1] == changed[0][1] + 1
            if not swapped or any(Counter(old) != Counter(new) for old, new in zip(given, schedule, strict=True)):
                raise Wrong("two neighbouring actions of one rank swapped", f"{len(changed)} places are different")
            simulated(schedule)

        rows.append((text_of(given), one_swap))
    yield from judged(size, "mend", rows)


def split_backward(size):
    """The gradients by autograd of the whole, with a zero added in front of each tanh."""
    for widths in ((3, 4, 2), (2, 3), (2, 2, 2, 2)) * (size == 2):
        weights = [normal(n, *shape) for n, shape in enumerate(pairwise(widths))]
        x, grad_output = normal(21, 5, widths[0]), normal(22, 5, widths[-1])
        y, inputs, added = x.clone().requires_grad_(), [], []
        start = y
        for weight in weights:
            inputs.append(y.detach())
            added.append(torch.zeros(5, weight.shape[1], dtype=torch.float64, requires_grad=True))
            y = torch.tanh(y @ weight + added[-1])
        grad_x, *gradients = torch.autograd.grad(y, [start, *added], grad_output)
        expected = [grad_x, [list(pair) for pair in zip(inputs, gradients, strict=True)]]
        what = f"{len(weights)} layer{'s' * (len(weights) > 1)} of widths {', '.join(map(str, widths))}"
        yield ExerciseCase(what, [(weights, x, grad_output)] * size, [expected] * size, nothing_sent)


# --- PyTorch's pipelines, and hybrids ------------------------------------------------------------


def accumulated_gradients(size):
    """Every micro-batch goes through its pair of ranks, and each gradient is averaged once, over the pairs."""
    if size == 3:
        return
    pairs = size // 2
    for microbatches, batches, each, widths in ((2, 1, 2, (3, 4, 2)), (4, 3, 1, (2, 3, 3)), (3, 2, 3, (4, 2, 5))):
        weights = [normal(40 + stage, *shape).requires_grad_() for stage, shape in enumerate(pairwise(widths))]
        biases = [normal(50 + stage, width).requires_grad_() for stage, width in enumerate(widths[1:])]
        shape = pairs, batches, microbatches * each
        inputs, targets = normal(41, *shape, widths[0]), normal(42, *shape, widths[-1])
        x = inputs
        for weight, bias in zip(weights, biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        loss = (x - targets).square().mean()
        right = [list(torch.autograd.grad(loss, own, retain_graph=True)) for own in zip(weights, biases, strict=True)]
        arguments = []
        for rank in range(size):
            pair, stage = divmod(rank, 2)
            first, last = (None if kept else list(data[pair]) for kept, data in ((stage, inputs), (not stage, targets)))
            arguments.append((weights[stage].detach(), biases[stage].detach(), first, last, microbatches))
        length = 8 * each * widths[1]

        def through_pairs(entries, due=microbatches * batches, length=length, right=right):
            for rank, own in enumerate(entries):
                peer = rank + 1 - 2 * (rank % 2)
                sent = sum((e.operation, e.peer, e.payload) == ("send", peer, length) for e in own)
                if sent != due:
                    raise Wrong(f"{due} messages of {length} bytes to rank {peer}", f"{sent} of them", rank)
                most = sum(gradient.nbytes for gradient in right[rank % 2])
                averaged: Counter = Counter()
                for entry in own:
                    averaged[entry.operation] += entry.payload if entry.operation not in ("send", "recv") else 0
                for operation, nbytes in averaged.items():
                    if nbytes > most:
                        got = f"{operation.replace('_', '-')} of {nbytes} in all"
                        raise Wrong(f"{most} bytes of gradients averaged", got, rank)

        counts = f"{batches} batch{'es' * (batches > 1)}", f"{pairs} pipeline{'s' * (pairs > 1)}"
        what = f"{counts[0]} of {microbatches} micro-batches, {counts[1]}"
        yield ExerciseCase(what, arguments, [right[rank % 2] for rank in range(size)], through_pairs)


ON_CLUSTERS = (  # batch, ranks, overhead, example, message, limit
    (32, 4, 50, (10, 10, 10), 0, 32),
    (32, 4, 50, (10, 10, 10), 0, 4),
    (32, 4, 5, (10, 10, 10), 40, 32),
    (24, 4, 9, (8, 57, 1), 2, 8),
    (48, 3, 200, (4, 4, 4), 2, 12),
)


@functools.cache
def choices(batch, ranks, overhead, example, message, limit) -> dict[tuple[str, int], Fraction]:
    """(schedule, micro-batches) -> how long a step takes, of all that keep to the limit."""
    found = {}
    for name in schedules.SCHEDULES:
        for m in (m for m in range(1, batch + 1) if batch % m == 0):
            try:
                schedule = schedules.build(name, ranks, m)
            except UserError:
                continue
            stages, n = len(simulator.placement(schedule)) // ranks, batch // m
            # In units of which `stages` are a microsecond: whole numbers, which are simulated ten times as fast.
            times = Times(*[overhead + n * each for each in example], communication=n * message * stages)
            timeline = simulate(schedule, times)
            if max(timeline.peaks) * n <= limit * stages:
                found[name, m] = Fraction(timeline.makespan) / stages
    return found


def schedule_and_microbatches(size, clusters=ON_CLUSTERS):
    """All schedules and all divisors, simulated."""
    rows = []
    for cluster in clusters:
        steps = choices(*cluster)
        best = min(steps.values())

        def judge(value, steps=steps, best=best, batch=cluster[0]):
            choice = tuple(value) if isinstance(value, list) else value
            known = isinstance(choice, tuple) and len(choice) == 2 and choice[0] in schedules.SCHEDULES
            if not known or choice[1] not in range(1, batch + 1) or batch % choice[1]:
                raise Wrong(f"a schedule's name and a divisor of {batch}", str(value)[:60])
            if choice not in steps:
                raise Wrong("a schedule that takes these numbers and keeps to the limit", str(choice))
            if steps[choice] > best:
                raise Wrong(f"a step of {float(best):g} microseconds", f"{choice}: {float(steps[choice]):g}")

        rows.append((*cluster, judge))
    yield from judged(size, "schedule_and_microbatches", rows)


def loss_factors(size):
    """Two replicas, and 8 tokens in all: a micro-batch of 2 has a quarter of them, times 2 since DDP divides by 2."""
    rows = [
        ([[2, 2], [2, 2]], [[0.5, 0.5], [0.5, 0.5]]),
        ([[4, 1, 3]], [[0.5, 0.125, 0.375]]),
        ([[1, 3], [2, 2]], [[0.25, 0.75], [0.5, 0.5]]),
        ([[1, 1], [5, 1]], [[0.25, 0.25], [1.25, 0.25]]),
        ([[6], [0], [3], [3]], [[2.0], [0.0], [1.0], [1.0]]),
    ]
    yield from calculated(size, "loss_factors", rows)


# --- what a class is asked, which nobody has seen: arguments of a call, or whole cases ---------------------------


def draw_microbatches_for(random):
    return random.randint(2, 16), random.randint(1, 4), random.randint(3, 40)


def draw_peak_megabytes(random):
    ranks = random.randint(2, 4)
    schedule = schedules.build(random.choice(["1f1b", "zb-h1", "gpipe"]), ranks, random.randint(ranks, 8))
    actions = text_of(schedule)[random.randrange(ranks)]
    return actions, {stage: random.randint(1, 20) for stage in range(ranks)}


def draw_makespan(random):
    ranks = random.randint(2, 4)
    schedule = schedules.build(random.choice(["1f1b", "gpipe"]), ranks, random.randint(ranks, 8))
    return text_of(schedule), random.randint(1, 5), random.randint(1, 9), random.randint(0, 4)


def draw_loss_factors(random):
    replicas, microbatches = random.randint(1, 4), random.randint(1, 4)
    return ([[random.randint(1, 30) for _ in range(microbatches)] for _ in range(replicas)],)


def draw_one_forward_one_backward(random, size):
    yield from one_forward_one_backward(size, [(random.randint(2, 6), random.randint(3, 10))])


def draw_short_of_memory(random, size):
    from course.pipeline.classroom import solutions  # an instructor can leave it out

    ranks, microbatches = random.randint(3, 5), random.randint(5, 9)
    limit = random.randint(1, ranks - 1)
    best = read(solutions.short_of_memory(ranks, microbatches, limit), ranks)
    span = simulator.simulate(best, UNIT).makespan
    yield from short_of_memory(size, [(ranks, microbatches, limit, span)])


def draw_interleave(random, size):
    ranks = random.randint(2, 5)
    yield from interleave(size, [(ranks, ranks * random.randint(1, 3), random.randint(2, 4))])


def draw_mend(random, size):
    """A backward before its forward, on the last rank; and one so early on the first that ranks wait for each other,
    which takes fewer micro-batches than ranks: with more, other ranks need not wait for rank 0's next forward."""
    ranks, few, microbatches = random.randint(3, 5), random.choice([3, 5, 6]), random.randint(5, 8)
    late = ("1f1b", ranks, microbatches, ranks - 1, 2 * random.randrange(microbatches))
    yield from mend(size, [late, ("1f1b", few, few - 1, 0, few - 2)])


def draw_schedule_and_microbatches(random, size):
    batch, ranks = random.choice([24, 32, 48]), random.randint(2, 5)
    example = tuple(random.randint(1, 20) for _ in range(3))
    cluster = batch, ranks, random.randint(1, 100), example, random.randint(0, 10), random.choice([6, 12, 48])
    yield from schedule_and_microbatches(size, [cluster])


UNDIVIDED = {
    "bytes of gradients averaged ... all-reduce of": "gradients are averaged after each step, or more than once: "
    "what has been averaged already is averaged again with the next batch's, and sent again",
}

EXERCISES = [
    exercise(
        one_forward_one_backward,
        points=2,
        dots=2,
        hint="How many micro-batches can rank r start before the first gradient is back, if each message on the way "
        "takes as long as a forward? Then one forward, one backward, until forwards run out.",
        draw_cases=draw_one_forward_one_backward,
    ),
    exercise(
        short_of_memory,
        points=3,
        dots=3,
        hint="Don't write the order down: play it. At each unit of time let every rank do a backward if its input is "
        "there, else a forward if its input is there and it stores less than the limit, and note what it did.",
        draw_cases=draw_short_of_memory,
    ),
    exercise(
        neighbours,
        points=2,
        dots=2,
        hint="A blocking send of a large message returns only when it is received. dist.isend returns at once: start "
        "the sends, receive, then wait; or hand all to dist.batch_isend_irecv.",
        mistakes={
            "rank 0: expected None as item 0, got a tensor": (
                "Nobody is before rank 0 and nobody is after the last rank: there the result is None, not an "
                "empty buffer. (Or the two results have changed places.)"
            ),
        },
    ),
    exercise(
        repaired_step,
        points=3,
        dots=3,
        hint="What do the gradients of a weight need that those of a bias, or of an input, do not? Where is it kept "
        "between forward and backward, and what else is written there?",
    ),
    exercise(
        microbatches_for,
        points=1,
        dots=1,
        hint="Solve (p-1) / (v m + p-1) <= percent / 100 for m, with whole numbers only: -(-a // b) rounds up.",
        draw=draw_microbatches_for,
    ),
    exercise(
        peak_megabytes,
        points=1,
        dots=1,
        hint="Go through the actions with a running sum. Which of B, I and W ends what a forward began?",
        draw=draw_peak_megabytes,
    ),
    exercise(
        makespan,
        points=3,
        dots=3,
        hint="Keep when each action ended. Go round the ranks and do what can be done, as long as something can; if "
        "actions are left then, they wait for each other.",
        draw=draw_makespan,
    ),
    exercise(
        interleave,
        points=2,
        dots=2,
        hint="How far must a rank be ahead of its backwards if messages take no time? Compare 1F1B's warm-up with the "
        "one of the notebook's interleaved schedule.",
        draw_cases=draw_interleave,
    ),
    exercise(
        mend,
        points=2,
        dots=2,
        hint="There are not many pairs of neighbours. simulator.simulate raises IllegalSchedule where a schedule is "
        "none; schedules.parse reads text.",
        draw_cases=draw_mend,
    ),
    exercise(
        split_backward,
        points=3,
        dots=3,
        hint="torch.autograd.grad gives gradients of tensors inside the graph, too: ask it for those of x and of each "
        "`input @ weight`, all at once. It computes no others.",
    ),
    exercise(
        accumulated_gradients,
        points=3,
        dots=3,
        hint="The last axis of a mesh varies fastest, so pipelines of ranks that follow each other are its last axis. "
        "What the schedule's step divides, and when, the page has measured; scale_grads=False leaves it to you.",
        mistakes=UNDIVIDED,
    ),
    exercise(
        schedule_and_microbatches,
        points=3,
        dots=3,
        hint="No formula tells: simulate them all. schedules.build makes a schedule and raises UserError for numbers "
        "that it refuses; simulator.placement tells on which rank each stage is, simulator.simulate how long it takes "
        "(makespan) and what is stored (peaks).",
        draw_cases=draw_schedule_and_microbatches,
    ),
    exercise(
        loss_factors,
        points=2,
        dots=2,
        hint="What share of all tokens, of all replicas, has the micro-batch? And what does DDP do to the sum?",
        draw=draw_loss_factors,
    ),
]
