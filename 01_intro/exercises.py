"""Exercises of chapter 01: collectives from sends and receives, and what they cost.

Replace each `raise NotImplementedError` by your answer, then run the last cell of the notebook or

    python -m common.check 01_intro               all exercises
    python -m common.check 01_intro ring_shift    one of them

Every function is called on all ranks at once, at world sizes 2, 3 and 4, with a process group already set up:
`dist.get_rank()` and `dist.get_world_size()` tell who you are. What holds for all of them:

* Return a new result and leave the arguments as they were.
* Where the text says "messages", use sends and receives only (`dist.send`, `dist.recv`, `dist.isend`,
  `dist.irecv`, `dist.batch_isend_irecv`). Who sends how much to whom is checked, not the result alone.
* "The right neighbour" of a rank is the next rank, and the last rank's is rank 0; the left one is opposite.
* "Chunk i" of a one-dimensional tensor is `tensor.tensor_split(size)[i]`, where size is the world size. Chunks
  may be uneven: 10 elements on 4 ranks are chunks of 3, 3, 2 and 2. With fewer elements than ranks some are empty.

Dots say how difficult an exercise is and how important its idea is for the later chapters.
"""

import torch
import torch.distributed as dist  # noqa: F401  for your answers


def ring_shift(tensor: torch.Tensor) -> torch.Tensor:
    """Send `tensor` to the right neighbour, in one message, and return what the left neighbour sent.

    `tensor` has the same shape and type on every rank, whatever they are.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


def global_mean(values: torch.Tensor) -> torch.Tensor:
    """Return, on every rank, the mean over all values of all ranks together, with exactly one `dist.all_reduce`.

    `values` is a one-dimensional float32 tensor. Its length differs from rank to rank and may be 0 on some, as in
    the last batch of an epoch. The result is a float32 tensor without dimensions: `tensor(2.5)`.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


def repaired_training(
    weights: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor, rate: float, steps: int
) -> list[torch.Tensor]:
    """Return what `faulty_training` in faulty.py should return: the two weights after `steps` steps of SGD.

    The model is `inputs @ weights[0] + inputs.square() @ weights[1]`, the loss the mean squared difference from
    `targets`, over the examples of all ranks. `inputs` [examples, n] and `targets` [examples] are this rank's own, as
    many on each rank; `weights`, two of [n], are the same on all ranks. All tensors are float64.

    It was run on two ranks and held against one process. With the same examples on both ranks, everything was right.
    With different ones, some steps were right and some were not. After a wrong step the ranks' weights were no longer
    equal. On each rank, the change of `weights[0]` was wrong and so was that of `weights[1]`, but the two changes added
    up to the right sum. Nothing was raised, and the loss was higher than it should be.

    Find the mistake before you write. Exactly one `dist.all_reduce` for each weight and step, as in faulty.py.

    Difficulty ●●○○○   Importance ●●●●●   up to 20 minutes   2 points
    """
    raise NotImplementedError


def ring_bytes(rank: int, size: int, elements: int, itemsize: int) -> int:
    """Return how many bytes rank `rank` of `size` sends in one ring all-reduce of `elements` elements, exactly.

    `itemsize` is the size of one element in bytes. The ring all-reduce is a reduce-scatter, after which rank r holds
    the sum of chunk r, and then an all-gather. In each of their steps every rank passes one chunk to its right
    neighbour. (On the page, the sum of chunk r + 1 ends on rank r. Here everything is one chunk further left: rank r
    sends chunk r - 1 first.) Chunks may be uneven, so the familiar 2(N-1)/N is exact only where `size`
    divides `elements`. Calculate only: send nothing.

    Difficulty ●●●○○   Importance ●●●○○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def all_reduce_seconds(algorithm: str, size: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Return the predicted time, in seconds, of one all-reduce of `nbytes` bytes on `size` ranks.

    A message of n bytes takes `latency + n / bandwidth` (in seconds and bytes per second): the alpha-beta model.
    A rank can send one message and receive another at the same time. The arithmetic of adding costs nothing.
    `algorithm` is one of

    * "ring": a ring reduce-scatter and then a ring all-gather, in chunks of `nbytes / size`;
    * "tree": a reduce to rank 0 along a binomial tree and then a broadcast along it, of whole tensors. A tree over
      `size` ranks has ceil(log2(size)) rounds;
    * "halving-doubling": as in the last exercise; `size` is then a power of two.

    Calculate only: send nothing.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def inner_axis(
    tensor: tuple[int, int, int],
    data: tuple[int, int, int],
    node: int,
    inside: tuple[float, float],
    between: tuple[float, float],
) -> tuple[str, float]:
    """Return (the axis whose ranks should be neighbours, "tensor" or "data"; seconds that a step then communicates).

    A mesh has two axes. `tensor` and `data` say of each (its ranks, the all-reduces that each rank makes along it in a
    step, the bytes of one of them). One axis is the inner one: each group along it is consecutive ranks. A group along
    the outer axis has every so-many-th rank, as many as the inner axis has ranks. `torchrun` puts ranks 0 to `node` - 1
    on the first node, and so on; all three numbers of ranks are powers of two.

    An all-reduce is a ring, in chunks of bytes / ranks, whose messages of n bytes take latency + n / bandwidth.
    `inside` and `between` are (latency, bandwidth), in seconds and bytes per second, inside a node and between nodes.
    All rings of an axis run at the same time without disturbing each other, one all-reduce after the other; a ring is
    as slow as its slowest link. Which axis is to be the inner one, so that the step communicates for the shortest time?
    "tensor" if it makes no difference. Calculate only: send nothing.

    Difficulty ●●●○○   Importance ●●●●●   up to 20 minutes   3 points
    """
    raise NotImplementedError


def all_to_all(parts: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
    """Send `parts[j]` to each other rank j and return the list of what came: item i is from rank i.

    `parts` has one one-dimensional tensor for each rank, of differing lengths; your own part stays with you.
    `lengths[i]` is the number of elements that rank i has for you. All are of one type. Exactly one message from
    each rank to each other rank, in whatever order; one of no elements may be left out by both.

    Difficulty ●●○○○   Importance ●●●○○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def tree_broadcast(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Return rank `root`'s `tensor` on every rank, passed on along a binomial tree of messages.

    In each round every rank that has the tensor sends it, whole, to one rank that has not, so that the number of
    ranks that have it doubles: all have it after ceil(log2(size)) rounds. Every rank but the root receives exactly
    once. `tensor` has the same shape and type on every rank; its values count on the root only.

    Difficulty ●●●○○   Importance ●●●○○   up to 20 minutes   3 points
    """
    raise NotImplementedError


def halving_doubling_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return, on every rank, the sum of all ranks' `tensor`s, in 2 log2(size) steps. `size` is a power of two.

    Reduce-scatter by recursive halving: the partner is first the rank `size / 2` away, with the number
    `rank ^ (size // 2)`, then `size / 4` away, ..., last the neighbour at distance 1. In each step the two of a
    pair divide between them the part that both are responsible for: each sends the half that the partner keeps, as
    one message, and adds what it receives to the half that it keeps.

    All-gather by recursive doubling: the same partners in reverse order. In each step a rank sends all that it has
    finished, so that what it has finished doubles.

    `tensor` is one-dimensional; where a part has an odd number of elements, halve it as you like, as long as both
    partners do the same. Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005.

    Difficulty ●●●●●   Importance ●●●○○   up to 60 minutes   4 points
    """
    raise NotImplementedError
