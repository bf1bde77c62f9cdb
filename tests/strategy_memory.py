"""What this course's strategies hold on a device, in a run of a GPT in float32 with AdamW: bytes at the moments of a
step at which there may be most.

State and messages of each strategy are said by a function of its Sizes, for construction and for a step. `peak` adds
what layers keep for their backward pass. Both are compared with accelerators that are not there:
tests/strategies/test_accelerator.py and tests/planner/test_planner_course.py.
"""

import functools
import math
from collections.abc import Callable

import torch

from course.fsdp.formulas import layer_bytes
from course.model_parallel.by_hand_layers import count, cut, layers_of


class Sizes:
    """Bytes of a case's model, whose numbers have four bytes each.

    whole, largest: of all parameters; of the largest one
    share, unit:    of those of this rank's stage and part along "tensor"; of the largest block of them
    n, t:           over how many ranks they are sharded; by how many they are cut
    """

    def __init__(self, config, who: tuple[str, str], size: int, rank: int):
        """config: the settings; who: (strategy, implementation), as rank `rank` of `size`."""
        self.who, self.size, self.rank = who, size, rank
        with torch.device("meta"):
            model = config.strategy_class.make_model(config)
        self.layers, self.axes, self.width = config.layers, config.axes, config.width
        self.experts = getattr(config.options, "experts", 0)
        self.micro_batches = getattr(config.options, "microbatches", 1)
        self.n, self.t = self.axes.get("shard", 1), self.axes.get("tensor", 1)
        self.parameters = [4 * parameter.numel() for parameter in model.parameters()]
        self.whole, self.largest = sum(self.parameters), max(self.parameters)
        self.share, self.unit = self.of(model), self.of(model.blocks[0])
        self.stage = 0
        self.stages = stages = size if who == ("model", "pytorch") else self.axes.get("pipeline", 1)
        if stages > 1:
            layers = list(layers_of(model).values())
            ends = cut([count(layer) for layer in layers], stages)
            shares = [sum(map(self.of, layers[begin:end])) for begin, end in zip((0, *ends), ends, strict=False)]
            inner = list(self.axes.values())[[*self.axes, "pipeline"].index("pipeline") + 1 :]
            self.stage = rank // math.prod(inner) % stages  # ranks along the axes that vary faster have the same one
            self.share = max(shares) if who == ("model", "pytorch") else shares[self.stage]

    def of(self, module) -> int:
        """Of a module's parameters, on a rank along "tensor": norms, positions and the biases of sums are not cut."""
        whole = ("norm", "positions", "out.bias", "down.bias")
        return sum(
            4 * parameter.numel() // (1 if any(word in name for word in whole) else self.t)
            for name, parameter in module.named_parameters()
        )


Said = tuple[list[dict[str, int]], list[dict[str, int]]]  # in construction and in a step: bytes at different moments


def adamw(parameters: int, gradients: int, owned: int, **more: int) -> dict[str, int]:
    """In the optimizer's step, which has the roots of all averages at once (foreach)."""
    return {"parameters": parameters, "gradients": gradients, "averages": 2 * owned, "their roots": owned, **more}


def plain(s: Sizes) -> Said:
    """Parameters, gradients and optimizer state of what is this rank's; nothing else is ever on the device."""
    return [{"parameters": s.share}], [adamw(s.share, s.share, s.share)]


def buckets(s: Sizes) -> Said:
    """Gradients lie in the reducer's buckets, which are there from the beginning."""
    return [{"parameters": s.share, "buckets": s.share}], [adamw(s.share, s.share, s.share)]


def beside_buckets(s: Sizes, owned: int) -> Said:
    """In a step's last backward pass, the gradients of the passes before lie beside DDP's buckets; those that arrive
    are added to them."""
    backward = {"parameters": s.share, "buckets": s.share, "averages": 2 * owned}
    backward |= {"gradients of passes before": s.share, "a gradient": s.largest}
    return buckets(s)[0], [backward, adamw(s.share, s.share, owned)]


def ddp_pytorch(s: Sizes) -> Said:
    return beside_buckets(s, s.share)


def replicas(s: Sizes, by_hand: bool) -> Said:
    """On the first device, at the end of a backward pass: the sums, which are then added to the gradients. By hand, a
    gradient that arrives lies beside the sum that it is added to; PyTorch's first device has a replica of its own as
    well, with a gradient of its own."""
    step = {"parameters": s.whole, "averages": 2 * s.whole, "gradients": s.whole, "sums": s.whole}
    more = {"arriving, and its sum": 2 * s.largest} if by_hand else {"a replica's": s.whole, "arriving": s.largest}
    return [{"parameters": s.whole}], [step | more]


def tensor_pytorch(s: Sizes) -> Said:
    """A weight that is being cut is whole on the device, and once more as the parts that are sent."""
    return [{"parameters": s.share, "a weight and its parts": 2 * s.largest}], plain(s)[1]


def experts(s: Sizes) -> Said:
    """In the backward pass, the gradients of this rank's experts' two weights come one by one and are stacked then."""
    all_experts = 4 * s.layers * s.experts * (8 * s.width**2 + 5 * s.width)
    s.share += all_experts // s.axes["expert"] - all_experts
    weights = 2 * 4 * s.experts // s.axes["expert"] * 4 * s.width**2
    backward = {"parameters": s.share, "gradients": s.share, "averages": 2 * s.share}
    backward |= {"the experts' gradients": weights, "those of one weight, stacked": weights // 2}
    return plain(s)[0], [backward, *plain(s)[1]]


def zero1(s: Sizes) -> Said:
    return [{"parameters": s.whole, "gradients": s.whole}], [adamw(s.whole, s.whole, s.whole // s.n)]


def zero1_pytorch(s: Sizes) -> Said:
    """Whole parameters are dealt out, the largest first, each to the rank that has least."""
    dealt = [0] * s.n
    for size in sorted(s.parameters, reverse=True):
        dealt[dealt.index(min(dealt))] += size
    return beside_buckets(s, dealt[s.rank])


def zero2(s: Sizes) -> Said:
    """Shards of parameters are views of the whole. In the backward pass two buckets are whole, each of one weight where
    weights are large: one is on its way, and to the other a gradient is being copied."""
    shard, bucket = s.whole // s.n, s.largest
    backward = {"parameters": s.whole, "gradients": shard, "averages": 2 * shard}
    backward |= {"two buckets": 2 * bucket, "a gradient": bucket, "a bucket's shard": bucket // s.n}
    return [{"parameters": s.whole}], [backward, adamw(s.whole, shard, shard)]


def shards(s: Sizes) -> dict[str, int]:
    shard = s.share // s.n
    return {"parameters": shard, "gradients": shard, "averages": 2 * shard}


def sharding(s: Sizes) -> list[dict[str, int]]:
    """In construction: a unit is whole while it is being sharded."""
    return [{"parameters": s.share // s.n, "a unit": s.unit}]


def zero2_pytorch(s: Sizes) -> Said:
    """In the forward pass of the second micro-batch all units are gathered, and two more lie in buffers of messages."""
    return sharding(s), [shards(s) | {"gathered": s.share, "two units as they arrive": 2 * s.unit}]


def fsdp_pytorch(s: Sizes) -> Said:
    """In the backward pass: two units gathered, the gradient of one, and that of one as it is sent. Where the
    mesh has two axes, units' shards of it are kept until the backward pass ends."""
    backward = {"two units": 2 * s.unit, "a unit's gradient": s.unit, "one that is sent": s.unit}
    if "data" in s.axes or s.who[0] == "mesh":  # which is given two axes always, one of size 1 here
        backward["shards that are sent"] = (s.layers - 2) * s.unit // s.n
    shard = s.share // s.n
    return sharding(s), [shards(s) | backward, adamw(shard, shard, shard)]


def fsdp(s: Sizes) -> Said:
    """In the backward pass: two units gathered, the gradients of two, and either one shard that arrives and a weight's
    gradient, or two shards that arrive."""
    backward = shards(s) | {"two units": 2 * s.unit, "two units' gradients": 2 * s.unit}
    one = backward | {"a unit's shard": s.unit // s.n, "a gradient": s.largest // s.t}
    shard = s.share // s.n
    return sharding(s), [one, backward | {"two units' shards": 2 * s.unit // s.n}, adamw(shard, shard, shard)]


def tensor_fsdp(s: Sizes) -> Said:
    """A unit's weights are cut one by one; then the unit is sharded, before the next one is moved."""
    cutting = {"shards of units before": (s.share - s.unit) // s.n, "a unit": s.unit}
    return [*sharding(s), cutting | {"a weight and its parts": 2 * s.largest}], fsdp_pytorch(s)[1]


def stages_fsdp(s: Sizes) -> Said:
    """A stage is one unit, and is sharded when tensor parallelism has cut its weights."""
    shard = s.share // s.n
    construction = [{"parameters": shard, "the stage": s.share}]
    if s.t > 1:
        construction.append({"the stage": s.share, "a weight and its parts": 2 * s.largest})
    backward = {"parameters": shard, "averages": 2 * shard, "the stage": s.share}
    backward |= {"its gradients": s.share, "a gradient": s.largest // s.t}
    return construction, [backward, adamw(shard, shard, shard)]


def mesh_pytorch(s: Sizes) -> Said:
    return stages_fsdp(s) if "pipeline" in s.axes else tensor_fsdp(s)


def mesh_by_hand(s: Sizes) -> Said:
    return fsdp(s) if s.n > 1 else plain(s)


# Of a strategy that is not here, `plain` is true.
SAYS: dict[tuple[str, str], Callable] = {
    ("dp", "pytorch"): functools.partial(replicas, by_hand=False),
    ("dp", "by-hand"): functools.partial(replicas, by_hand=True),
    ("ddp", "pytorch"): ddp_pytorch,
    ("ddp", "by-hand"): buckets,
    ("tensor", "pytorch"): tensor_pytorch,
    ("expert", "by-hand"): experts,
    ("pipeline+ddp", "pytorch"): buckets,
    ("pipeline+fsdp", "pytorch"): stages_fsdp,
    ("zero1", "pytorch"): zero1_pytorch,
    ("zero1", "by-hand"): zero1,
    ("zero2", "pytorch"): zero2_pytorch,
    ("zero2", "by-hand"): zero2,
    ("fsdp", "pytorch"): fsdp_pytorch,
    ("fsdp", "by-hand"): fsdp,
    ("hsdp", "pytorch"): fsdp_pytorch,
    ("hsdp", "by-hand"): fsdp,
    ("tensor+fsdp", "pytorch"): tensor_fsdp,
    ("mesh", "pytorch"): mesh_pytorch,
    ("mesh", "by-hand"): mesh_by_hand,
}


def stated(s: Sizes) -> Said:
    """Of a strategy as (name, implementation) in `s.who`."""
    return SAYS.get(s.who, plain)(s)


# --- with activations ---------------------------------------------------------------------------------------------

FLOAT32 = 4
ACCUMULATED_IN_BUCKETS_TOO = {("ddp", "pytorch"), ("zero1", "pytorch")}


def before_backward(s: Sizes) -> int:
    """Bytes of state, and of what a strategy has gathered, when the backward pass of a step's last micro-batch begins,
    of two or more: gradients of those before are there."""
    (name, kind), share, shard = s.who, s.share, s.share // s.n
    if s.who in ACCUMULATED_IN_BUCKETS_TOO:  # under no_sync gradients are tensors of their own; buckets wait for them
        return 3 * share + 2 * shard
    if name == "zero1":
        return 2 * s.share + 2 * shard
    if name == "zero2":
        return s.share + (4 if kind == "pytorch" else 3) * shard
    if s.n > 1 and "pipeline" in s.axes:  # the stage is gathered, and gradients are whole until its last micro-batch
        return 3 * shard + 2 * s.share
    if s.n > 1:  # two units are gathered; by hand, the first unit's gradient begins as zeros
        return 4 * shard + 2 * s.unit + (s.unit if kind == "by-hand" else 0)
    return 4 * share


def peak(s: Sizes, tokens: int) -> int:
    """The most bytes that are alive on a device in a step of several micro-batches.

    tokens: of a micro-batch that a strategy is given, of all ranks along "context" together; what a pipeline cuts
    further is not counted apart. Either it is in the optimizer's step, or in the last layer's backward pass, when
    there are gradients of activations and of a weight besides everything that layers have kept.
    """
    name, kind = s.who
    moments = [sum(said.values()) for said in stated(s)[1]]
    pipeline = s.axes.get("pipeline", 1)
    own = tokens // s.axes.get("context", 1) // (s.micro_batches if pipeline > 1 else 1)
    own //= s.size if name == "dp" else 1  # one process cuts the micro-batch for its devices
    stream = FLOAT32 * s.width * own
    keeps = layer_bytes(
        s.width, s.width, s.width, 4 * s.width, tensor=s.t, sequence_parallel=name == "sequence", itemsize=FLOAT32
    )
    held = min(pipeline - s.stage, s.micro_batches) if pipeline > 1 else 1
    kept = held * s.layers // s.stages * keeps * own
    if name == "sequence":  # the inputs of attention and MLP, gathered from all ranks, instead of a rank's tokens
        kept += 2 * s.layers * (stream - stream // s.t)
    if kind == "pytorch" and pipeline > 1:  # its stages have a buffer for what each micro-batch receives
        last = s.stage == pipeline - 1
        moments = [moment + (1 if last or s.stage == 0 else 2) * s.micro_batches * stream for moment in moments]
        kept += (1 if last or s.stage == 0 else 2) * s.micro_batches * stream
    weight = FLOAT32 * 4 * s.width**2 // s.t
    if s.experts:  # weights of all of a rank's experts get their gradients when the MLP's activations are gone
        return int(max(moments[0] + 8 * stream, *moments[1:]))
    inner = 4 * stream // s.t
    # In the layer's backward pass most is alive either at its last product, or at its second to last, when the MLP's
    # inner layer is gone, but the gradient of its input is there as a part and as a sum, with tensor parallelism.
    gradients = max(stream + inner, 3 * stream - inner if s.t > 1 else 0)
    # Or before, at the last norm, while the layers have all that they keep: its input, and its gradient before and
    # after; in DTensor's messages the part that a rank had stays beside the sum.
    at_head = (4 if s.who == ("tensor", "pytorch") else 3) * stream if s.stage == s.stages - 1 else 0
    return int(max(*moments, before_backward(s) + kept + max(gradients + weight, at_head)))
