"""How the exercises of chapter 02 are graded: the table EXERCISES at the end, and the checks that it names.

One process does all that is asked for here, so every case is called on two ranks alike, and must send nothing.
Expected values are written down, or computed with all examples at once.
"""

import torch

from common.grading.engine import Exercise, ExerciseCase
from common.grading.patterns import nothing_sent


def alike(size, what, arguments, expected):
    return ExerciseCase(what, [arguments] * size, [expected] * size, nothing_sent)


def slice_sizes(size):
    if size > 2:
        return  # nothing is sent: once is enough
    for batch, devices, expected in (
        (8, 4, [2, 2, 2, 2]),
        (8, 3, [3, 3, 2]),
        (9, 4, [3, 3, 3, 0]),
        (2, 4, [1, 1, 0, 0]),
        (5, 1, [5]),
        (10**10 + 1, 2, [5 * 10**9 + 1, 5 * 10**9]),
    ):
        yield alike(size, f"slice_sizes({batch}, {devices})", (batch, devices), expected)


def mean_of_slices(size):
    if size > 2:
        return
    for means, counts, expected in (
        ([1.0, 3.0], [2, 2], 2.0),
        ([3.0, 7.5], [5, 4], 5.0),
        ([2.0, 5.0, None], [2, 1, 0], 3.0),
    ):
        yield alike(size, f"slices of {counts}", (means, counts), expected)


def add_up(size):
    if size > 2:
        return
    one, two, three = (torch.full((2,), value) for value in (1.0, 10.0, 100.0))
    for what, gradients, expected in (
        ("two devices", [[one, two], [two, three]], [one + two, two + three]),
        (
            "a parameter that one replica did not use",
            [[one, None], [None, two], [three, two]],
            [one + three, two + two],
        ),
        ("a parameter that nobody used", [[one, None], [two, None]], [one + two, None]),
        ("one device", [[one, None]], [one, None]),
    ):
        yield alike(size, what, (gradients,), expected)


def gradients_of_copies(size):
    """d/dw mean((x @ w - t)^2) = sum over the slice of 2 (x @ w - t) x / batch."""
    if size > 2:
        return
    generator = torch.Generator().manual_seed(2)
    # Divided by powers of two all is exact, whatever the order of a processor's sums; some slices are uneven, or fewer.
    for batch, devices in ((4, 2), (8, 3), (4, 3), (2, 1)):
        inputs = torch.randint(-3, 4, (batch, 2), generator=generator).float()
        weight, targets = torch.tensor([1.0, -2.0]), torch.arange(batch).float()
        per_example = 2 * (inputs @ weight - targets)[:, None] * inputs / batch
        expected = [part.sum(0) for part in per_example.chunk(devices)]
        yield alike(size, f"{batch} examples on {devices} device(s)", (weight, inputs, targets, devices), expected)


def repaired_replicas(size):
    if size > 2:
        return
    inputs = torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    targets, weight = inputs.sum(1) + 1, torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    for devices, steps in ((1, 3), (2, 1), (2, 2), (3, 4)):
        expected = weight.clone()
        for _ in range(steps):
            expected = expected - 0.1 * 2 * inputs.T @ (inputs @ expected - targets) / len(inputs)
        what = f"{devices} device(s), {steps} step(s)"
        yield alike(size, what, (weight, inputs, targets, devices, 0.1, steps), expected)


def running_mean(size):
    """Worked out by hand: first slices have means [1, 2] and [4, 0]; 0.5 * 1 = 0.5, then 0.5 * 0.5 + 0.5 * 4 = 2.25."""
    if size > 2:
        return
    batches = [
        torch.tensor([[0.0, 1.0], [2.0, 3.0], [50.0, 60.0], [70.0, 80.0]]),
        torch.tensor([[3.0, -1.0], [5.0, 1.0], [90.0, 90.0]]),
    ]
    for devices, momentum, expected in (
        (2, 0.5, [2.25, 0.5]),
        (2, 1.0, [4.0, 0.0]),
        (4, 0.5, [1.5, -0.25]),
        (1, 1.0, [98 / 3, 30.0]),
    ):
        what = f"batches of 4 and 3 on {devices} device(s), momentum {momentum}"
        yield alike(size, what, (batches, devices, momentum), torch.tensor(expected))


def bytes_held(size):
    """On device 0: 3 * 100 + 40 + 2 * 1000 = 2340; elsewhere 100 + 40."""
    if size > 2:
        return
    for arguments, expected in (
        ((0, 4, 100, 1000, 40), 2340),
        ((1, 4, 100, 1000, 40), 140),
        ((3, 4, 100, 1000, 40), 140),
        ((0, 1, 7, 20, 3), 64),
    ):
        yield alike(size, f"bytes_held{arguments}", arguments, expected)


def bytes_copied(size):
    """For 4 devices: 3 times (100 + 30 out, 100 back), and 3/4 of 8 out, of 4000 back, and of 4000 out again."""
    if size > 2:
        return
    for arguments, expected in (
        ((4, 100, 0, 8, 4000), 600 + 6 + 6000),
        ((4, 100, 30, 8, 4000), 690 + 6 + 6000),
        ((2, 50, 10, 20, 4), 110 + 10 + 4),
        ((1, 100, 30, 8, 4000), 0),
    ):
        yield alike(size, f"bytes_copied{arguments}", arguments, expected)


def best_devices(size):
    """With 1 s to start and 16 s to compute an operation: 16, 8, 5.3 s for 1, 2, 3 devices, then 4 and 4, then 5.

    With 4 s to start it: 16 and 4 s for 1 device, 8 and 8 s for 2, then 12 s."""
    if size > 2:
        return
    for arguments, expected in (
        ((100, 1.0, 16.0, 8), 4),
        ((100, 1.0, 16.0, 3), 3),
        ((100, 1.0, 0.5, 8), 1),
        ((10, 1.0, 6.0, 8), 2),
        ((10, 1.0, 7.0, 8), 3),
        ((10, 4.0, 16.0, 8), 2),
    ):
        yield alike(size, f"best_devices{arguments}", arguments, expected)


# --- what a class is asked, which nobody has seen: arguments of a call, or whole cases ---------------------------


def draw_slice_sizes(random):
    return random.randint(1, 200), random.randint(2, 9)


def draw_mean_of_slices(random):
    counts = [random.randint(1, 9) for _ in range(random.randint(2, 5))]
    return [random.randint(1, 40) / 8 for _ in counts] + [None], counts + [0]


def draw_bytes_held(random):
    devices = random.randint(2, 8)
    return random.choice([0, devices - 1]), devices, *(random.randint(1, 10_000) for _ in range(3))


def draw_bytes_copied(random):
    devices = random.randint(2, 8)
    trainable, frozen = random.randint(1, 10_000), random.randint(1, 10_000)
    return devices, trainable, frozen, devices * random.randint(1, 900), devices * random.randint(1, 900)


def draw_best_devices(random):
    """Nowhere are two equal: 2 k + 1 work is not n times n' starts."""
    return random.randint(10, 500), 2.0, random.choice([7.0, 23.0, 51.0, 103.0, 399.0]), random.randint(3, 16)


EXERCISES = [
    Exercise(
        name="slice_sizes",
        points=1,
        difficulty="●○○○○",
        check=slice_sizes,
        draw=draw_slice_sizes,
        hint="All slices but the last have the same length, the batch divided by the devices and rounded up. Nine "
        "examples on four devices are three slices.",
    ),
    Exercise(
        name="mean_of_slices",
        points=1,
        difficulty="●○○○○",
        check=mean_of_slices,
        draw=draw_mean_of_slices,
        hint="Turn each mean back into a sum: the mean times the number of its examples. Leave out what has none.",
    ),
    Exercise(
        name="add_up",
        points=2,
        difficulty="●●○○○",
        check=add_up,
        hint="zip(*gradients) gives the gradients of one parameter from all devices. `total += gradient` writes into "
        "a tensor that may be one of the arguments.",
    ),
    Exercise(
        name="gradients_of_copies",
        points=3,
        difficulty="●●●○○",
        check=gradients_of_copies,
        hint="A copy is weight.clone().requires_grad_(). Compute the outputs slice by slice, join them with torch.cat, "
        "take one loss, and ask torch.autograd.grad for the gradients of all copies at once.",
    ),
    Exercise(
        name="repaired_replicas",
        points=2,
        difficulty="●●○○○",
        check=repaired_replicas,
        hint="Print the weight that each device computes with, in the first and in the second step. DataParallel "
        "copies the parameters in every forward pass: which line does that here, and how often does it run?",
        mistakes={
            "2 device(s), 2 step(s) ... got [1.19675": "Devices other than the first still compute with the weight of "
            "the first step: their copies have to be made anew once it has changed.",
            "2 device(s), 1 step(s) ... got [1.10615": "The slices have 4 and 3 examples. Their means count alike "
            "here, but the loss is the mean over all examples.",
        },
    ),
    Exercise(
        name="running_mean",
        points=2,
        difficulty="●●○○○",
        check=running_mean,
        hint="batch.chunk(devices)[0] is all that the first replica sees.",
    ),
    Exercise(
        name="bytes_held",
        points=2,
        difficulty="●●○○○",
        check=bytes_held,
        draw=draw_bytes_held,
        hint="Device 0 has the parameters once, not twice: its replica shares them. Count move by move, up to "
        "the moment after the loss.",
    ),
    Exercise(
        name="bytes_copied",
        points=2,
        difficulty="●●●○○",
        check=bytes_copied,
        draw=draw_bytes_copied,
        hint="Five things travel: parameters out, gradients back, inputs out, outputs back, and one more on the way "
        "back. Of what belongs to the batch, device 0's own share stays at home.",
    ),
    Exercise(
        name="best_devices",
        points=2,
        difficulty="●●○○○",
        check=best_devices,
        draw=draw_best_devices,
        hint="The interpreter starts devices * operations operations; a device computes all operations, each of them "
        "on its slice. Take the larger of the two times for each number of devices, then the number with the least.",
    ),
]
