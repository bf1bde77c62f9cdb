"""Exercises of chapter 04: one model spread over ranks by its layers, its matrices, its tokens, its experts.

Replace each `raise NotImplementedError` by your answer, then run the last cell of a notebook or

    python -m common.check 04_model_parallel                  all exercises
    python -m common.check 04_model_parallel frozen_step      one of them

Every function is called on all ranks at once, at world sizes 2, 3 and 4, with a process group already set up:
`dist.get_rank()` and `dist.get_world_size()` tell who you are. What holds for all of them:

* Return a new result, of the type of the arguments, and leave the arguments as they were.
* All ranks belong to one model. N is the world size. "Whole" is what one process would have; where a whole tensor is
  cut into parts, they are equal, consecutive, and rank r has part r.
* Operations and bytes are checked, not the result alone. Where the text says "calculate only", send nothing.
* Layers, ranks, tokens, positions, experts and vocabulary entries count from 0. Where a tuple is asked for, a list
  will do.

Dots say how difficult an exercise is and how important its idea is for the later chapters.
"""

import torch
import torch.distributed as dist  # noqa: F401  for your answers

# --- layers split over ranks ---------------------------------------------------------------------


def balanced_cut(costs: list[int], parts: int) -> list[int]:
    """Return how many layers each of `parts` ranks gets, so that the largest cost of a rank is as small as possible.

    `costs[i]` is the cost of layer i, in bytes or in microseconds; a rank's cost is the sum over its layers. Layers
    keep their order, and every rank gets at least one. The best cut is unique in all cases. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def frozen_step(
    weight: torch.Tensor, inputs: torch.Tensor | None, targets: torch.Tensor | None, batch: int, frozen: int
) -> torch.Tensor | None:
    """Return the gradient of this rank's `weight`, in a model with one layer on each rank; None if it is frozen.

    Layer r is on rank r, and makes `torch.tanh(x @ weight)` of x [batch, n] with its weight [n, m]; n and m may be
    others on each rank. The first `frozen` layers aren't trained; the last one always is. The inputs of the model are
    on rank 0 alone, the targets on the last rank alone; the others get None. The loss is
    `(outputs - targets).square().sum()`. All tensors are float64.

    Every rank but the last sends one message to the next rank, with activations. Gradients go from a rank to the one
    before in one message, wherever somebody needs them, and nowhere else.

    Difficulty ●●●○○   Importance ●●●●●   up to 30 minutes   3 points
    """
    raise NotImplementedError


def tied_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the whole gradient of a weight that the first and the last layer share: both ranks must step alike.

    Rank 0 and the last rank have a copy of the weight, and each has a gradient from its own use of it, of the same
    shape: the result is their sum. The ranks between get None, and return None. Rank 0 and the last rank send each
    other one message with their gradient, of more than a megabyte. Nothing else is sent.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def naive_utilisation(forward: list[float], backward: list[float], message: float) -> tuple[float, list[float]]:
    """Return (seconds of one step, the share of it in which each rank computes), for layers split naively.

    Rank r's layers take `forward[r]` seconds forward and `backward[r]` backward. The whole batch goes through as one
    piece: rank 0 to the last rank and back. To pass activations or gradients on to a neighbour takes `message`
    seconds, in which nobody computes. Calculate only.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


# --- tensor and sequence parallel --------------------------------------------------------


def parallel_mlp_backward(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (whole gradient of `x`, gradient of this rank's part `up`, gradient of its part `down`).

    With whole tensors, the MLP would be `torch.relu(x @ up) @ down`. Here `up` [width, hidden / N] holds a part of the
    columns, and `down` [hidden / N, width] the rows that go with them. `x` [tokens, width] is whole and the same on all
    ranks; so are `grad_output`, the gradient of the loss with respect to the whole output, and the gradient of `x`. The
    forward pass has been: its outputs are not needed again. Exactly one `dist.all_reduce`, of a tensor
    of the shape of `x`.

    Difficulty ●●●○○   Importance ●●●●●   up to 25 minutes   3 points
    """
    raise NotImplementedError


def parallel_embedding(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return, on every rank, the rows of the whole embedding table for `tokens`: [batch, time, width].

    `tokens` [batch, time], int64, is the same on all ranks. `table` [vocabulary / N, width] is this rank's part of
    the rows of the whole table. Exactly one `dist.all_reduce`, of a tensor of the shape of the result.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return, on every rank, the mean cross-entropy over all tokens, without gathering the logits.

    `logits` [tokens, vocabulary / N], float64, is this rank's part of the columns of the whole logits; `targets`
    [tokens], int64, is the same on all ranks and counts through the whole vocabulary. Logits may be as large as
    10,000, on one rank only. The result is a tensor without dimensions. No rank may send more bytes than
    all-reduces of three float64 numbers for each token would.

    Difficulty ●●●○○   Importance ●●●●●   up to 30 minutes   3 points
    """
    raise NotImplementedError


def gradient_norm(gradients: list[torch.Tensor], sharded: list[bool]) -> float:
    """Return, on every rank, the 2-norm of the gradient of the whole model, each element of it counted once.

    Where `sharded[i]`, each rank has another part of parameter i, and `gradients[i]` is the gradient of this rank's
    part; otherwise the parameter is on every rank, with the same whole gradient. There is at least one sharded
    parameter. One `dist.all_reduce` of one number, of at most 8 bytes.

    Difficulty ●●○○○   Importance ●●●●●   up to 15 minutes   2 points
    """
    raise NotImplementedError


def tensor_ranks(
    width: int, tokens: int, gpus: int, smallest: int, flops: float, inside: float, between: float
) -> tuple[int, float]:
    """Return (ranks along tensor, seconds of one layer of a training step) of the quickest way to use `gpus` GPUs.

    Nodes have 8 GPUs, and `gpus` is a power of two. With t ranks along tensor, a power of two of at least `smallest`
    (with fewer a layer doesn't fit), there are d = gpus / t replicas, each of which has tokens / d tokens. All have
    16-bit numbers, of 2 bytes. For a layer

    * the GPUs compute: 72 * width**2 FLOPs for each token, over all GPUs, at `flops` FLOP/s;
    * along tensor there are 4 all-reduces of the activations of a replica's tokens, `width` numbers each;
    * along data there is one all-reduce of a GPU's gradients, 12 * width**2 / t numbers.

    An all-reduce of n bytes on r ranks takes 2 (r - 1) / r * n / bandwidth seconds. Tensor is the inner axis: groups
    along it are consecutive ranks, with the bandwidth `inside` up to 8 ranks, `between` with more. The replicas have
    `inside` if all GPUs are in one node, else `between`. Nothing is hidden. Where two are equally quick, take fewer
    ranks along tensor. Calculate only.

    Difficulty ●●○○○   Importance ●●●●●   up to 20 minutes   2 points
    """
    raise NotImplementedError


# --- inside a node -------------------------------------------------------------------------------


def parallel_dropout(x: torch.Tensor, probability: float, seed: int, dimension: int | None) -> torch.Tensor:
    """Return `x` after dropout: what one process would have, or this rank's part of it.

    One process drops an element of the whole activations where `torch.rand(shape, generator=g)`, with their whole
    shape and with `g` a `torch.Generator` seeded with `seed`, is less than `probability`, and divides the others by
    1 - probability. `x` is this rank's part of the whole activations, cut along `dimension`, or the whole itself,
    the same on all ranks, if that is None. `seed` is the same on all ranks. Calculate only.

    Difficulty ●●○○○   Importance ●●●○○   up to 15 minutes   2 points
    """
    raise NotImplementedError


# --- long contexts -------------------------------------------------------------------------------


def repaired_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what `faulty_attention` in faulty.py should return: this rank's part of the output, [heads, time / N, d].

    `q`, `k` and `v` [heads, time / N, d], float64, belong to this rank's part of the tokens. Every query sees every key
    of all ranks; scores are `q @ k^T / sqrt(d)`. Scores may be as large as 1,000.

    It was held against one process. On one rank everything was right, and on several nearly so at first, when all
    scores were close to 0. As training went on and scores grew, the loss stayed above that of one process. With values
    that are all 1 the output should be all 1: for some queries it was, to the last digit, for others it was less. With
    keys and values dealt out to the ranks in another order, other queries were right.

    Find the mistake before you write. Messages as in faulty.py: keys and values travel round the ring, to the next
    rank, N - 1 times, together or apart.

    Difficulty ●●●○○   Importance ●●●●●   up to 25 minutes   3 points
    """
    raise NotImplementedError


def ring_pairs(positions: list[list[int]]) -> int:
    """Return how long a causal ring takes, counted in pairs of a query and a key, when all wait for the slowest.

    `positions[rank]` are the positions of the tokens that a rank holds: any order, any number of ranks. In turn 0
    each rank has its own keys, in turn t those of the rank t places before it in the ring. A rank computes the
    pairs of its queries and the keys that it has, but only those whose key is not later than the query. A
    turn takes as long as the rank with most pairs; the result is the sum over all turns. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def sequence_to_heads(x: torch.Tensor) -> torch.Tensor:
    """Return all tokens for this rank's part of the heads, [time, heads / N, d], as DeepSpeed-Ulysses does.

    `x` [time / N, heads, d] has all heads for this rank's part of the tokens. Exactly one all-to-all, of a tensor of
    the size of `x` (or of a list of N equal parts of it).

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


# --- experts -------------------------------------------------------------------------------------


def apply_capacity(probabilities: torch.Tensor, k: int, capacity: int) -> list[list[int]]:
    """Return which tokens each expert takes, in the order of the tokens.

    `probabilities` [tokens, experts] is what the router says; all numbers in a row are different. Each token chooses
    the `k` experts that are most probable for it. An expert takes no more than `capacity` tokens: the earliest of
    those that chose it, be it their first choice or their last, so that no token is dropped because of a later one.
    The other choices are dropped, and no other expert takes their place. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def load_balancing_loss(probabilities: torch.Tensor) -> float:
    """Return, on every rank, the load-balancing loss over the tokens of all ranks together.

    `probabilities` [n, experts], float64, is what the router says of this rank's n tokens: n may be another on each
    rank, also 0. A token goes to its most probable expert. With f_i the share of all tokens that go to expert i, and
    P_i the mean over all tokens of the probability of expert i, the loss is experts * (sum over i of f_i * P_i)
    (Fedus et al., "Switch Transformers", 2021, equations 4 to 6, without their alpha). One `dist.all_reduce`, of
    at most 2 * experts + 1 float64 numbers.

    Difficulty ●●●○○   Importance ●●●○○   up to 25 minutes   3 points
    """
    raise NotImplementedError
