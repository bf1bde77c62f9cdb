"""Exercises of chapter 06: state cut into shards, units that are gathered and freed, and what fits into a budget.

Replace each `raise NotImplementedError` by your answer, then run the last cell of a notebook or

    python -m common.check 06_fsdp                   all exercises
    python -m common.check 06_fsdp own_pieces       one of them

Every function is called on all ranks at once, at world sizes 2, 3 and 4, with a process group already set up:
`dist.get_rank()` and `dist.get_world_size()` tell who you are. What holds for all of them:

* Return a new result, of the type of the arguments, and leave the arguments as they were.
* N is the world size. A vector is cut into N equal, consecutive shards, and rank r has shard r. Where N does not divide
  its length, zeros at its end, as few as possible, make it longer until it does: the padding.
* Operations and bytes are checked, not the result alone. Where the text says "calculate only", send nothing.
* P is the number of parameters. Ranks, parameters and units count from 0. Where a tuple is asked for, a list will do.

Dots say how difficult an exercise is and how important its idea is in practice.
"""

import torch
import torch.distributed as dist  # noqa: F401  for your answers

# --- ZeRO by hand --------------------------------------------------------------------------------


def own_pieces(sizes: list[int], rank: int, world: int) -> list[list[int]]:
    """Return which elements of which parameters are in the shard of rank `rank` of `world`.

    `sizes[i]` is the number of elements of parameter i. The parameters are laid one after another in one vector, which
    is padded and cut. The result has an item [parameter, first, end] for each parameter of which an element is in the
    shard: the parameter's elements first, first + 1, ..., end - 1, counted from its own beginning. Padding is no
    parameter. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def sharded_step(
    vector: torch.Tensor, gradient: torch.Tensor, moment: torch.Tensor, square: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (the vector of all parameters after a step of AdamW, this rank's shards of the new moments).

    `vector`, all parameters, is the same on every rank; `gradient` is this rank's own, of the same length, which N
    divides. `moment` and `square` are this rank's shards of AdamW's two moments. `step` counts from 1. With g the
    average of the ranks' gradients and all operations element by element:

        moment = 0.9 * moment + 0.1 * g              square = 0.999 * square + 0.001 * g**2
        m = moment / (1 - 0.9**step)                 s = square / (1 - 0.999**step)
        vector = vector - 0.1 * 0.01 * vector - 0.1 * m / (sqrt(s) + 1e-8)

    Exactly one reduce-scatter and one all-gather (`dist.all_gather_single`), in this order, and nothing else. All
    tensors are float64. Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.

    Difficulty ●●●○○   Importance ●●●●●   up to 25 minutes   3 points
    """
    raise NotImplementedError


def repaired_decay(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], decays: list[bool], rate: float, decay: float
) -> list[torch.Tensor]:
    """Return what `faulty_step` in faulty.py should return: all parameters after a step, whole, on every rank.

    Parameter i becomes `p - rate * (g + decay * p)` where `decays[i]`, else `p - rate * g`, with g the average of all
    ranks' gradients. `parameters` and `decays` are the same on all ranks, `gradients` are this rank's own. All tensors
    are float64. Weights decay; biases and the scales of norms usually don't.

    It was held against one process. A model with 1,200 parameters was right with 2, 3 and 4 ranks, one with 1,201 was
    not. The elements that were off had changed by `rate * decay` times their value too much or too little. Elements of
    rank 0's shard were always right. Of rank 1's it was the first element of a weight or of a bias that was off, of
    rank 2's it was the first two, of rank 3's the first three. All ranks agreed, and the loss showed nothing.

    Find the mistake before you write. Exactly one reduce-scatter and one all-gather of all elements, padding included.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def global_norm(shards: list[torch.Tensor], lengths: list[int]) -> float:
    """Return, on every rank, the 2-norm of the gradient of the whole model, each element of it counted once.

    `shards[u]` is this rank's shard of unit u's vector of gradients, which has `lengths[u]` elements and then padding;
    after a reduce-scatter in a buffer that was used before, anything may stand in the padding. A unit that two modules
    share is in the list twice, as one and the same tensor object. Exactly one `dist.all_reduce` of one number, of at
    most 8 bytes. The result is a Python float.

    Difficulty ●●●○○   Importance ●●●●○   up to 25 minutes   3 points
    """
    raise NotImplementedError


def accumulated_shard(micro_gradients: list[torch.Tensor], keep_whole: bool) -> torch.Tensor:
    """Return this rank's shard of the gradient of the mean loss over the whole global batch.

    `micro_gradients[i]` is the gradient of the *mean* loss over this rank's micro-batch i: vectors of one length, which
    N divides. All micro-batches have the same number of examples, and every rank has the same number of them.

    With `keep_whole`, as in stage 1, the rank may keep one whole vector until the last micro-batch: exactly one
    reduce-scatter. Without, as in stages 2 and 3, a gradient has to be cut before the next one comes: exactly one
    reduce-scatter for each micro-batch.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def kept_bytes(strategy: str, parameters: int, ranks: int, mixed: bool) -> tuple[float, float, float]:
    """Return the bytes that each rank keeps between steps with AdamW: (of parameters, of gradients, of the optimizer).

    `strategy` is "ddp", "zero1", "zero2" or "fsdp". Not `mixed`, everything is float32: a parameter, its gradient, and
    the optimizer's two moments. In `mixed` precision parameters and gradients have 2 bytes each, and the optimizer
    keeps the parameter and two moments in float32. No padding. Calculate only. Source: Rajbhandari et al., "ZeRO:
    Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, sections 3.1 and 5.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


def sent_in_a_step(strategy: str, parameters: int, ranks: int, accumulation: int) -> float:
    """Return the bytes that each rank sends in one optimizer step of `accumulation` micro-batches, in float32.

    By the ring algorithms: an all-gather or a reduce-scatter of B bytes (the whole vector's) sends B * (N - 1) / N from
    each rank, an all-reduce twice that. What each strategy does:

    * "ddp": an all-reduce of the gradients, after the last micro-batch;
    * "zero1": a reduce-scatter of the gradients after the last micro-batch, an all-gather of the parameters;
    * "zero2": a reduce-scatter in every micro-batch, an all-gather of the parameters;
    * "fsdp": in every micro-batch an all-gather of the parameters for the forward pass, another one for the backward
      pass, and a reduce-scatter.

    Loss and norm are too small to count. Calculate only.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


# --- fully_shard ---------------------------------------------------------------------------------


def gathered_peak(units: list[int], ahead: int, reshard: bool) -> int:
    """Return the most bytes of whole parameters and whole gradients that a rank of stage 3 holds at any moment.

    `units[u]` is the size, in bytes, of unit u's parameters; its gradients have the same size. The forward pass
    computes unit 0, 1, 2, ..., the backward pass goes the other way. While unit u computes, it is gathered, and so are
    the next `ahead` units in the direction of the pass, as far as there are. In the backward pass the gradients of the
    unit that computes are whole too; here they are cut before the next unit computes (fully_shard: while it does).
    With `reshard`, a unit is freed as soon as it has computed, in both passes. Without, it is freed only in the
    backward pass. Shards do not count. Calculate only.

    Difficulty ●●●○○   Importance ●●●●●   up to 25 minutes   3 points
    """
    raise NotImplementedError


def full_state(shards: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> list[torch.Tensor] | None:
    """Return, on rank 0, all parameters whole; None on the other ranks, which may have no room for them.

    `shards[i]` is this rank's part of parameter i of shape `shapes[i]`, cut by rows as fully_shard does it: each rank
    in turn gets ceil(rows / N) rows, as long as there are. So the last ranks may have fewer rows, or none at all, and
    nothing is padded. Every rank but 0 sends each of its shards that has rows to rank 0, in one message, parameter by
    parameter. Nothing else is sent.

    Difficulty ●●●○○   Importance ●●●●○   up to 25 minutes   3 points
    """
    raise NotImplementedError


def checkpoint_sources(rows: int, saved: tuple[int, int], loaded: tuple[int, int], rank: int) -> list[int]:
    """Return the ranks of the run that saved a checkpoint which hold rows that `rank` of the loading run needs.

    A weight of `rows` rows was cut by `ColwiseParallel` and then by `fully_shard`, on a mesh (shard, tensor) of the
    sizes `saved`, whose ranks count row by row, the last dimension fastest. The run that loads it has a mesh of the
    sizes `loaded`, with as many ranks as that takes. All ranks of a mesh have equally many rows. Ascending, each rank
    once. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def hybrid_gradient(gradient: torch.Tensor, replicas: int) -> torch.Tensor:
    """Return this rank's shard of the average of all ranks' gradients, with hybrid sharding on a mesh.

    The mesh has `replicas` rows of N / replicas ranks each, filled row by row. `gradient` is this rank's own: a vector
    whose length the ranks of a row divide. It is cut over the ranks of a row: all ranks of a column have the same
    shard. Exactly one reduce-scatter among the ranks of a row, of the whole vector, then one all-reduce among those of
    a column, of the shard. You need groups: `dist.new_group(ranks)` must be called by *all* ranks for every group, also
    for those that they are not in; or take `init_device_mesh("cpu", shape)` and its `get_group(dimension)`.

    Difficulty ●●●○○   Importance ●●●●○   up to 30 minutes   3 points
    """
    raise NotImplementedError


# --- fitting it in -------------------------------------------------------------------------------


def scaled_step(shard: torch.Tensor, scale: float, good: int, interval: int) -> tuple[torch.Tensor | None, float, int]:
    """Return (the gradient to step with or None, the next scale, the next `good`), for loss scaling over shards.

    `shard` is this rank's shard of a gradient that is `scale` times too large. If any element of any rank's shard is
    infinite or not a number, all ranks skip the step: the gradient is None, the scale is halved, and `good` becomes 0.
    Otherwise the gradient is the shard divided by the scale, and `good` grows by 1; as soon as it reaches `interval`,
    the scale is doubled, for the next step, and `good` becomes 0. One `dist.all_reduce` of one number, of at most
    8 bytes. Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    Difficulty ●●●○○   Importance ●●●●○   up to 20 minutes   3 points
    """
    raise NotImplementedError


def recomputed(blocks: int, every: int, activations: int, boundary: int, seconds: float) -> tuple[int, float]:
    """Return (most bytes of activations at any moment, seconds of forward and backward pass) with recomputation.

    The model has `blocks` equal blocks. A block keeps `activations` bytes for its backward pass, of which `boundary`
    bytes are its input. It takes `seconds` seconds forward and twice as long backward. Every `every` blocks, which
    divides `blocks`, are one segment. Of a segment only the input of its first block is kept in the forward pass. In
    the backward pass the segment is computed once more, with all that it keeps, right before its own backward pass;
    then it is forgotten, its input included. With `every` 0 nothing is recomputed. Calculate only. Source: Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.

    Difficulty ●●●○○   Importance ●●●●○   up to 25 minutes   3 points
    """
    raise NotImplementedError


def micro_batch_for(budget: int, kept: int, example: int, batch: int, ranks: int) -> tuple[int, int]:
    """Return (examples in a rank's micro-batch, micro-batches in a step), with as few micro-batches as will fit.

    A rank has `budget` bytes. `kept` bytes are there whatever the micro-batch, and each example of a micro-batch takes
    `example` bytes. The global batch is `batch` examples: per-rank micro-batch x `ranks` x number of micro-batches,
    exactly. `ranks` divides `batch`. Where not even one example fits, return (0, 0). Calculate only.

    Difficulty ●●○○○   Importance ●●●●●   up to 15 minutes   2 points
    """
    raise NotImplementedError


def fewest_ranks(strategy: str, parameters: int, activations: int, budget: int) -> int:
    """Return the smallest power of two, 1 included, of ranks on which the model fits; 0 if it fits on none.

    A rank has `budget` bytes, of which `activations` are needed for activations and buffers whatever the number of
    ranks. What it keeps besides is that of `kept_bytes` in mixed precision, with 2 bytes for a parameter, 2 for its
    gradient and 12 in the optimizer. To fill the budget to the last byte is allowed. Calculate only.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


# --- choosing ------------------------------------------------------------------------------------


def fit_on_four_cards() -> tuple[int, int, int, str, bool]:
    """Return a layout with which Llama 13B trains on one machine with four RTX 4090 cards, of 24 GB each.

    The layout is (ZeRO's stage 0 to 3, ranks along tensor, sequences in a micro-batch, recomputation "none" or "full",
    whether the optimizer's state is offloaded). What tensor parallelism leaves of the four cards divides the batch of
    64 sequences of 2,048 tokens. The precision is "bf16-mixed", the framework "torch". By the planner's estimate
    it must fit ("yes", not "tight"), need at most 256 GiB of the machine's own memory for all four cards together, and
    reach at least 3,200 tokens per second. There is more than one such layout. Calculate only: try
    `planner.estimate`, or

        python -m planner estimate --model llama-13b --gpu rtx-4090 --gpus 4 --gpus-per-node 4 --help

    Difficulty ●●○○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def best_offer(model: str, offers: list[tuple[str, int, float]], sequence: int) -> tuple[str, float] | None:
    """Return (GPU, dollars for a billion tokens) of the offer on which training is cheapest; None if it fits on none.

    Each of `offers` is (GPU as the planner names it, number of GPUs, dollars for one GPU and hour). On each, take what
    the planner estimates for ZeRO stage 3 over all GPUs with one sequence of `sequence` tokens on each, full
    recomputation, and everything else as `planner.layout.make_layout` and `planner.hardware.cluster` have it by
    default. An offer counts only if the estimate says that it fits: "yes", and not "tight". Calculate only.

    Difficulty ●●●○○   Importance ●●●●○   up to 25 minutes   3 points
    """
    raise NotImplementedError
