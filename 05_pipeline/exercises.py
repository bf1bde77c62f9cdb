"""Exercises of chapter 05: pipelines: bubbles, schedules within a budget, and the parts of an executor.

Replace each `raise NotImplementedError` by your answer, then run the last cell of a notebook or

    python -m common.check 05_pipeline                             all exercises
    python -m common.check 05_pipeline one_forward_one_backward    one of them

Every function is called on all ranks at once, with a process group already set up. Only `neighbours`,
`repaired_step` and `accumulated_gradients` send anything: they are tried at world sizes 2, 3 and 4, the last without 3,
and `dist.get_rank()` and `dist.get_world_size()` tell who you are. All others calculate, the same on every rank: their
`ranks` is an argument.

* Return a new result and leave the arguments as they were. Where a tuple is asked for, a list will do.
* Ranks, stages and micro-batches count from 0. There are at least as many micro-batches as ranks unless it says not.
* A schedule is a list with one list for each rank: its actions, in the order in which it does them. An action is
  text: stage, kind and micro-batch, as in "2F0". Kinds are F (forward), B (backward), and the two parts into which a
  backward can be split, I (backward for input) and W (backward for weight).
* A schedule is judged by what comes of it in the chapter's simulator: is it legal, how long does it take (makespan),
  and how many activations does each rank store. Messages take no time, and F and B one unit each unless it says not.
  If your schedule is over its budget, or gets stuck, you are shown its timeline.

Dots say how difficult an exercise is and how important its idea is for the later chapters.
"""

import torch
import torch.distributed as dist  # noqa: F401  for your answers

# --- from idle devices to 1F1B -------------------------------------------------------------------


def one_forward_one_backward(ranks: int, microbatches: int) -> list[list[str]]:
    """Return 1F1B for a slow network, with F and B, stage r on rank r: a message takes one unit, as long as F or B.

    Budget: makespan 2 * microbatches + 4 * (ranks - 1), and rank r stores at most 2 * (ranks - r) - 1 activations: for
    4 ranks and 8 micro-batches makespan 28 and 7, 5, 3, 1 stored. There may be fewer micro-batches than ranks. (Where
    messages take no time, 1F1B stores ranks - r; here it would take 38.)

    Difficulty ●●○○○   Importance ●●●●●   up to 20 minutes   2 points
    """
    raise NotImplementedError


def short_of_memory(ranks: int, microbatches: int, limit: int) -> list[list[str]]:
    """Return a schedule of one stage per rank (stage r on rank r), with F and B, that stores little.

    Budget: at most `limit` activations on any rank, with `limit` less than `ranks`. For 4 ranks and 8 micro-batches,
    makespan 64 with a limit of 1, 34 with a limit of 2 and 26 with a limit of 3. For 3 ranks and 7 micro-batches,
    makespan 24 with a limit of 2. Nothing quicker exists.

    Difficulty ●●●○○   Importance ●●●○○   up to 30 minutes   3 points
    """
    raise NotImplementedError


def neighbours(
    activations: torch.Tensor | None, gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (the activations that the rank before sent, the gradient that the next rank sent).

    In the steady state of 1F1B each rank sends `activations` to the next rank and `gradient` to the rank before, and
    gets the same kind of messages from them; all tensors are float32 of one shape, and larger than a megabyte. The
    last rank has no activations to send (None) and gets no gradient (None); rank 0 has no gradient to send and gets no
    activations. One message for each tensor, no other.

    Difficulty ●●○○○   Importance ●●●●●   up to 20 minutes   2 points
    """
    raise NotImplementedError


def repaired_step(
    weight: torch.Tensor,
    bias: torch.Tensor,
    inputs: torch.Tensor | None,
    targets: torch.Tensor | None,
    batch: int,
    microbatches: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `faulty_step` in faulty.py should return: the gradients of this rank's weight and bias.

    Layer r of a model is on rank r, and makes `torch.tanh(x @ weight + bias)` of x [batch, n] with its weight [n, m]
    and bias [m]; n and m may be others on each rank. The inputs are on rank 0 alone, the targets on the last rank
    alone; the others get None. The loss is the mean over the whole batch, `(outputs - targets).square().mean()`. The
    batch goes through in `microbatches` equal parts, which are consecutive. All tensors are float64.

    It was run on three ranks and held against one process. With one micro-batch, everything was right. With several,
    the loss was right at the first step, and so were the gradients of all biases, and of the weight of rank 0. The
    gradients of the other ranks' weights were wrong, on the last rank too, by a factor that differs from element to
    element. Nothing was raised, and the loss fell, though more slowly than it should.

    Find the mistake before you write. Messages as in faulty.py: for each micro-batch one to each neighbour.

    Difficulty ●●●○○   Importance ●●●●●   up to 25 minutes   3 points
    """
    raise NotImplementedError


# --- the schedule lab ----------------------------------------------------------------------------


def microbatches_for(ranks: int, stages_per_rank: int, percent: int) -> int:
    """Return the smallest number of micro-batches with which the bubble is at most `percent` of the makespan.

    The schedule is GPipe or 1F1B for one stage per rank, and interleaved 1F1B for more; all stages take equally long.
    With interleaving the number need not be a multiple of `ranks` here. It may be less than `ranks`, but not 0.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


def peak_megabytes(actions: list[str], megabytes: dict[int, int]) -> int:
    """Return how many megabytes of activations a rank holds at most, when it does these actions in this order.

    A forward of stage s adds `megabytes[s]`. They are free again after the whole backward of that stage and
    micro-batch, or after both of its parts; a backward for weight never comes before that for input.

    Difficulty ●○○○○   Importance ●●●●○   up to 10 minutes   1 point
    """
    raise NotImplementedError


def makespan(schedule: list[list[str]], forward: int, backward: int, message: int) -> int | None:
    """Return when the last rank is done, or None if ranks wait for each other for ever: a simulator of your own.

    The kinds are F, which takes `forward`, and B, which takes `backward`. A rank does its actions in order, each as
    soon as the one before is over and its input is there. A forward needs that of the stage before, a backward that of
    the stage after (that of the last stage its own forward), for the same micro-batch; from another rank it arrives
    `message` after it was done. Stages may be on the ranks in any way. Every stage does each micro-batch once forward
    and once backward.

    Difficulty ●●●○○   Importance ●●●●○   up to 40 minutes   3 points
    """
    raise NotImplementedError


def interleave(ranks: int, microbatches: int, stages_per_rank: int) -> list[list[str]]:
    """Return an interleaved schedule, with F and B: stage s is on rank s % ranks.

    `microbatches` is a multiple of `ranks`. Budget: makespan 2 * (stages_per_rank * microbatches + ranks - 1), and
    rank r stores at most stages_per_rank * ranks - r activations: for 4 ranks, 8 micro-batches and 2 stages per rank
    makespan 38 and 8, 7, 6, 5 stored. (That of the notebook, and PyTorch's, stores 11, 9, 7, 5, to give messages time
    to arrive. Here they take none.)

    Difficulty ●●○○○   Importance ●●●○○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def mend(schedule: list[list[str]]) -> list[list[str]]:
    """Return the schedule with two neighbouring actions of one rank swapped, so that it becomes legal.

    It was 1F1B, with F and B or split into F, I and W, on any number of ranks; then somebody swapped two neighbouring
    actions, and now it is in the wrong order or ranks wait for each other for ever. Whichever swap makes it legal will
    do.

    Difficulty ●●○○○   Importance ●●●○○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def split_backward(
    weights: list[torch.Tensor], x: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return (gradient of `x`, what is to be kept for each layer): a stage's backward for input.

    The stage is `for weight in weights: x = torch.tanh(x @ weight)`, and `grad_output` is the gradient of its output.
    For each layer, first to last, keep (its input, the gradient of `input @ weight`): the backward for weight can then
    be done at any time, as `input.T @ gradient`. Weight gradients are not computed here.

    Difficulty ●●●○○   Importance ●●●●○   up to 25 minutes   3 points
    """
    raise NotImplementedError


# --- PyTorch's pipelines, and hybrids ------------------------------------------------------------


def accumulated_gradients(
    weight: torch.Tensor,
    bias: torch.Tensor,
    inputs: list[torch.Tensor] | None,
    targets: list[torch.Tensor] | None,
    microbatches: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's weight and bias, by way of torch.distributed.pipelining.

    There are 2 or 4 ranks, and each two that follow each other are a pipeline of two stages: ranks 0 and 1, ranks 2 and
    3. A stage makes `torch.tanh(x @ weight + bias)` of x, and the same stage has the same weights in both pipelines.
    Each pipeline has several batches of its own, equally many, of one size: `inputs` on its first rank, `targets` on
    its second; the other is None. Let a schedule of PyTorch's do a step for each of them, in `microbatches` equal parts
    (2 or more), and let the gradients add up. The loss is the mean of `(outputs - targets).square()` over all examples
    of all batches of both pipelines. Between pipelines gradients travel once, after the last step.

    Difficulty ●●●○○   Importance ●●●●●   up to 30 minutes   3 points
    """
    raise NotImplementedError


def schedule_and_microbatches(
    batch: int, ranks: int, overhead: int, example: tuple[int, int, int], message: int, limit: int
) -> tuple[str, int]:
    """Return the name of the schedule and the number of micro-batches with which a step is quickest.

    The names are those of `schedules.SCHEDULES`, each with as many stages on a rank as it usually has. The number must
    divide `batch`. A forward pass of n examples takes a rank `overhead + n * example[0]` microseconds, through all of
    its layers; the two parts of a backward pass take it `overhead + n * example[1]` (I) and `overhead + n * example[2]`
    (W), and a message takes `n * message`. No rank may ever store the activations of more than `limit` examples,
    through all of its layers: those of one of its two stages count half. Schedules that refuse the numbers are left
    out. Where several choices are equally quick, any will do.

    Difficulty ●●●○○   Importance ●●●●●   up to 30 minutes   3 points
    """
    raise NotImplementedError


def loss_factors(tokens: list[list[int]]) -> list[list[float]]:
    """Return by what each micro-batch's loss has to be multiplied before its backward, for a pipeline under DDP.

    `tokens[replica][m]` is how many tokens micro-batch m of a replica has; the loss of a micro-batch is the mean over
    its tokens. Gradients of the micro-batches of a replica add up; then those of the replicas are averaged. The result
    must be the gradient of the mean over all tokens of all replicas.

    Difficulty ●●○○○   Importance ●●●●●   up to 15 minutes   2 points
    """
    raise NotImplementedError
