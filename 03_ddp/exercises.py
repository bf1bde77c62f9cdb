"""Exercises of chapter 03: the reducer, the data that feeds the ranks, and what more ranks bring.

Replace each `raise NotImplementedError` by your answer, then run the last cell of the notebook or

    python -m common.check 03_ddp                       all exercises
    python -m common.check 03_ddp rebuilt_buckets       one of them

Every function is called on all ranks at once, at world sizes 2, 3 and 4, with a process group already set up:
`dist.get_rank()` and `dist.get_world_size()` tell who you are. What holds for all of them:

* Return a new result and leave the arguments as they were. An average keeps its gradient's shape and type.
* "The average" of a gradient is its sum over all ranks divided by the world size, the same on every rank.
* Operations and bytes are checked, not the result alone. Where the text says "calculate only", send nothing.
* Where it says "one all-reduce of all gradients", lay them one after another in one flat tensor, for a single
  `dist.all_reduce` with not an element more.
* Indices, ranks, buckets, steps and epochs count from 0. Where a tuple is asked for, a list will do.

Dots say how difficult an exercise is and how important its idea is for the later chapters.
"""

import torch
import torch.distributed as dist  # noqa: F401  for your answers

# --- the reducer, and training with it ---------------------------------------------------


def accumulated_gradient(micro_gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return, on every rank, the gradient of the mean loss over the whole global batch, with one `dist.all_reduce`.

    `micro_gradients[i]` is the gradient of the *mean* loss over this rank's micro-batch i. All micro-batches have
    the same number of examples, and every rank has the same number of micro-batches. All tensors are of the same
    shape and type. The all-reduce is of one such tensor: the other backward passes are inside `no_sync`.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


def learning_rate(step: int, base_rate: float, base_batch: int, batch: int, warmup: int) -> float:
    """Return the learning rate of step `step` by the linear scaling rule with gradual warm-up.

    `base_rate` is known to be good for a global batch of `base_batch` examples. For one of `batch` examples the
    rule multiplies it by the same factor as the batch. Training does not begin there: in step 0 the rate is
    `base_rate`, then it grows by the same amount every step, and from step `warmup` on it is the scaled one.
    `warmup` may be 0. Calculate only. Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in
    1 Hour", 2017, sections 2.1 and 2.2.

    Difficulty ●○○○○   Importance ●●●○○   up to 10 minutes   1 point
    """
    raise NotImplementedError


def average_gradients(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return, on every rank, the averages of the ranks' gradients, with one `dist.all_reduce` for each type.

    A part of the model computes in bfloat16, so that `gradients` are float32 and bfloat16 tensors of any shapes, in any
    order, the same on all ranks. All gradients of one type travel in one flat tensor with not an element more; the type
    of the first gradient goes first. Values are whole numbers times the world size, small enough to be exact.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def rebuilt_buckets(arrived: list[int], sizes: list[int], first_cap: int, cap: int) -> list[list[int]]:
    """Return, on every rank, the buckets that DistributedDataParallel lays out anew after its first step.

    `sizes[p]` is the number of bytes of parameter p's gradient. `arrived` is the order in which the parameters'
    gradients arrived on this rank; it may be another on each rank. Buckets are filled in the order of rank 0, because
    all ranks need the same ones. A parameter is never cut: bucket 0 is closed as soon as it holds `first_cap` bytes or
    more, and each later one as soon as it holds `cap` bytes or more. The last bucket has what is left; none is empty.
    Exactly one `dist.broadcast`, of one int64 for each parameter.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def bf16_average(gradient: torch.Tensor) -> torch.Tensor:
    """Return, on every rank, the average of `gradient` as float32, for half the bytes.

    `gradient` is a float32 tensor. It travels in one `dist.all_reduce` as bfloat16: divide it by the world size,
    round to bfloat16, sum. The price is a rounded result. Values as large as 3e38 must survive, on all ranks at once.

    Difficulty ●●○○○   Importance ●●●○○   up to 10 minutes   2 points
    """
    raise NotImplementedError


def average_with_unused(
    gradients: list[torch.Tensor | None], shapes: list[tuple[int, ...]]
) -> list[torch.Tensor | None]:
    """Return the averages of gradients that some ranks do not have: what `find_unused_parameters` is for.

    `gradients[i]` is None where parameter i took no part in this rank's forward pass; its gradient then counts as
    zeros of `shapes[i]`. The sum is divided by the world size, however many ranks have the gradient. Where no rank
    at all has it, the result is None, so that the optimizer leaves the parameter alone. All gradients are float32.

    Exactly two all-reduces, in this order: a bitmap that tells which gradients there are, a uint8 tensor with one
    element for each parameter; then one all-reduce of all gradients, zeros included, since a flat bucket has the
    same layout on every rank.

    Difficulty ●●●○○   Importance ●●●●○   up to 25 minutes   3 points
    """
    raise NotImplementedError


def repaired_reducer(steps: list[list[torch.Tensor | None]], shapes: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Return what `FaultyReducer(shapes)` in faulty.py should return from `average`, step by step.

    `steps[k][i]` is this rank's gradient of parameter i in step k, of shape `shapes[i]` and type float32, or None where
    parameter i took no part in this rank's forward pass; that counts as zeros in the average over all ranks.

    It trained a model with four experts, of which a rank uses some in each step. The first step was right. From then on
    all parameters that every rank used in every step were right, and the others were not. An expert that nobody used in
    a step got exactly the average of the step before once more. Fingerprints of the ranks agreed all the time, nothing
    was raised, and the loss fell.

    Find the mistake before you write. Exactly one all-reduce of all gradients in each step, as in faulty.py.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def first_difference(parameters: list[torch.Tensor]) -> int:
    """Return, on every rank, the index of the first of `parameters` that is not the same on all ranks; -1 if none.

    Parameters are the same if shape, type and every value are. There are equally many on every rank. They are
    large, so compare fingerprints: no rank may send more than 4,096 bytes in all, with whatever collectives you
    like. Two tensors with the same values in another order, or in another shape, are different.

    Difficulty ●●●○○   Importance ●●●○○   up to 30 minutes   3 points
    """
    raise NotImplementedError


# --- feeding the ranks ---------------------------------------------------------------------------


def sampler_indices(size: int, epoch: int, seed: int, rank: int, world: int) -> list[int]:
    """Return the examples that rank `rank` of `world` reads in an epoch, as `DistributedSampler` deals them out.

    The epoch's order is `torch.randperm(size, generator=g)` with `g` a `torch.Generator` seeded with
    `seed + epoch`. If `world` does not divide `size`, the list is made longer until it does, by the examples from
    its own beginning, over and over if there are too few. Then the ranks take turns: the first example of the list
    is rank 0's, the second rank 1's, and so on. Calculate only, without DistributedSampler.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def exact_accuracy(correct: torch.Tensor, size: int) -> float:
    """Return, on every rank, the share of the `size` examples of a test set that were recognised, each counted once.

    Examples 0, 1, 2, ... were dealt out to the ranks in turns: rank r has numbers r, r + world size, and so on.
    Where the world size does not divide `size`, examples from the beginning follow the last one until all ranks
    have equally many: those are repetitions. `correct` is a one-dimensional tensor of bools, one for each example
    that this rank has, in that order. One `dist.all_reduce` of at most two numbers, of 8 bytes each. The result is a
    Python float.

    Difficulty ●●○○○   Importance ●●●●●   up to 15 minutes   2 points
    """
    raise NotImplementedError


def examples_of_step(step: int, batch: int, size: int, seed: int, rank: int, world: int) -> list[int]:
    """Return the examples that rank `rank` of `world` reads in step `step`, whoever may have read the steps before.

    The order of epoch e is `torch.randperm(size, generator=g)` with `g` a `torch.Generator` seeded with `seed + e`.
    The orders of epochs 0, 1, 2, ... are laid end to end, without a gap, and cut into global batches of `batch`
    examples; `batch` may be larger than `size`. Step k reads batch k. Each batch is cut into `world` equal parts,
    in order: the first is rank 0's. So a run can be resumed at any step, on any number of ranks that divides
    `batch`. Calculate only.

    Difficulty ●●●○○   Importance ●●●●●   up to 20 minutes   3 points
    """
    raise NotImplementedError


def uneven_steps(gradients: list[torch.Tensor], elements: int) -> list[torch.Tensor]:
    """Return, on every rank, the gradient of each step where the ranks have unequally many: what `join` is for.

    `gradients[k]` is this rank's gradient of step k: a one-dimensional float32 tensor of `elements` elements. Some
    ranks have fewer of them than others, or none at all. There are as many steps as the longest list has. The result
    of a step is the mean over the ranks that have a gradient for it, not over all ranks. Nobody knows the other
    ranks' number of steps, and nobody may wait in vain. No rank may send more bytes than all-reduces of
    `(steps + 1) * (elements + 1)` float32 numbers would.

    Difficulty ●●●●○   Importance ●●●○○   up to 30 minutes   4 points
    """
    raise NotImplementedError


# --- scaling -------------------------------------------------------------------------------------


def speedup_and_efficiency(kind: str, ranks: int, alone: float, together: float) -> tuple[float, float]:
    """Return (speed-up, efficiency) of `ranks` ranks over one.

    A step takes `alone` seconds on one rank and `together` seconds on `ranks` ranks. The speed-up is the ratio of
    examples per second, the efficiency its share of the best possible. `kind` is one of

    * "strong": the global batch is the same on one rank and on many;
    * "weak": the batch of each rank is the same, so that many ranks do more in a step.

    Calculate only.

    Difficulty ●○○○○   Importance ●●●●○   up to 10 minutes   1 point
    """
    raise NotImplementedError


def cheapest_in_time(
    steps: int, gradients: float, offers: list[tuple[str, float, int, float, float, float]], hours: float
) -> tuple[str, int, float] | None:
    """Return (name of the offer, GPUs, dollars) with which a training is cheapest and over in time; None if none is.

    Each of `offers` is (name, seconds that one GPU computes in a step of the whole global batch, GPUs in a node,
    bandwidth inside a node, bandwidth between nodes, dollars for one GPU and hour), with bandwidths in bytes/s.
    You can have 1, 2, 4, 8, ... GPUs of one offer, 1,024 at most; a node is filled before the next is begun.

    n GPUs compute the global batch in an n-th of the seconds, of which two thirds are the backward pass. The gradients,
    `gradients` bytes, are all-reduced by a ring, which takes 2 (n - 1) / n * gradients / bandwidth: that inside a node
    as long as all GPUs are in one, else that between. What of it doesn't fit beside the backward pass is exposed, and
    makes the step longer. The training has `steps` steps and at most `hours` hours. Where dollars are equal, take fewer
    GPUs. Calculate only.

    Difficulty ●●○○○   Importance ●●●●●   up to 20 minutes   2 points
    """
    raise NotImplementedError


# --- surviving a crash ---------------------------------------------------------------------------


def common_checkpoint(steps: list[int]) -> int:
    """Return, on every rank, the newest step of which *every* rank has a checkpoint; -1 if there is none.

    Each rank saves its share on the disk of its own node, so that after a crash some ranks may lack what others have.
    `steps` are the steps whose files are complete on this rank's disk, from 0 to 999, in any order; there may be none.
    No rank may send more than 16,384 bytes in all, with whatever collectives you like.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def cheapest_saving(
    offers: list[tuple[str, float, float]], between_failures: float, restart: float
) -> tuple[str, float, float]:
    """Return (name of the way to save, interval, share of the time that is lost) with which the least time is lost.

    Each of `offers` is (name, seconds for which a checkpoint stops training, seconds until it is written). A checkpoint
    that is written in the background, as by `async_save`, stops training for less than it takes to write; the next one
    can't begin before it is written. So the interval is Young's, but at least as long as the writing takes.

    The share that is lost is that of saving, plus that of a failure every `between_failures` seconds, which costs half
    an interval and a restart of `restart` seconds. No two offers lose equally much. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError
