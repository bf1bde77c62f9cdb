"""The cases of test_accelerator.py: every strategy on 4 or on 8 accelerators, and the bytes that each of them says it
holds on a device."""

import functools
import math
import tempfile
from dataclasses import dataclass

import torch
from helpers import FULL, configure

from common.mesh import parse_axes, resolve
from course.model_parallel.by_hand_layers import count, cut, layers_of
from course.strategies import STRATEGIES

WIDTH, HEADS, CONTEXT, VOCABULARY = 4096, 8, 16, 256  # so wide that activations of a few tokens are next to nothing
EXPERTS = 16
MESHES = {  # of the strategies that have no mesh of their own
    ("mesh", "pytorch", 4): "shard=2,tensor=2",
    ("mesh", "pytorch", 8): "pipeline=2,shard=2,tensor=2",
    ("mesh", "by-hand", 4): "shard=2,tensor=2",
    ("mesh", "by-hand", 8): "pipeline=2,data=2,tensor=2",
}
ONE_PROCESS = {("dp", "pytorch"), ("dp", "by-hand"), ("model", "pytorch")}  # which drives all of the accelerators
UNCHECKED: dict[tuple[str, str], str] = {}  # strategies that cannot be examined, and why: none


@dataclass(frozen=True)
class Case:
    """A strategy on `size` accelerators, as rank `rank` sees it."""

    strategy: str
    implementation: str
    size: int
    rank: int

    @property
    def who(self) -> tuple[str, str]:
        return self.strategy, self.implementation

    def __str__(self):
        return f"{self.strategy} {self.implementation}, rank {self.rank} of {self.size}"


KINDS = [(strategy, kind) for strategy, make_entry in STRATEGIES.items() for kind in make_entry().implementations]
FIRST, LAST = (4, 0), (8, 7)  # rank 0 of 4; and of 8 that with a pipeline's last stage, which starts without weights


def places(number: int, strategy: str, implementation: str) -> tuple[tuple[int, int], ...]:
    """Where a strategy is examined: by hand in a pipeline, and with FULL=1, in both places, else in one of them, such
    that each is the place of about half of the strategies."""
    pipeline = strategy.startswith("pipeline") or strategy == "mesh"
    if FULL or (pipeline and implementation == "by-hand"):
        return FIRST, LAST
    return (LAST,) if pipeline or number % 2 else (FIRST,)


CASES = [
    Case(*who, *place) for number, who in enumerate(KINDS) if who not in UNCHECKED for place in places(number, *who)
]


def settings(case: Case):
    """The settings of the run, examined as those of a command line are."""
    entry, mesh, own = STRATEGIES[case.strategy](), MESHES.get((*case.who, case.size)), {}
    cls, alone = entry.implementations[case.implementation], case.who in ONE_PROCESS
    axes = parse_axes(mesh) if mesh else resolve(cls.preset, case.size)
    stages = case.size if case.who == ("model", "pytorch") else axes.get("pipeline", 1)
    if hasattr(cls.Options, "microbatches"):
        own["microbatches"] = 2 * stages if case.strategy == "pipeline+ddp" else stages
    if hasattr(cls.Options, "experts"):
        own["experts"] = EXPERTS
    if mesh:
        own["mesh"] = mesh
    # A block for each stage; the first one has the embedding besides, and the last one the head.
    layers = stages if stages > 1 else (3 if entry.chapter == "06_fsdp" else 2 if "tensor" in axes else 1)
    with tempfile.TemporaryDirectory() as folder:
        return configure(
            "", 1 if alone else case.size, 0 if alone else case.rank,
            strategy=case.strategy, implementation=case.implementation, run_dir=f"{folder}/run", batch_size=256,
            layers=layers, width=WIDTH, heads=HEADS, context=CONTEXT, accumulation_steps=2, **own,
        )  # fmt: skip


# --- what strategies say ------------------------------------------------------------------------------------------


class Sizes:
    """Bytes of a case's model, whose numbers have four bytes each.

    whole, largest: of all parameters; of the largest one
    share, unit:    of those of this rank's stage and part along "tensor"; of the largest block of them
    n, t:           over how many ranks they are sharded; by how many they are cut
    """

    def __init__(self, case: Case):
        config = settings(case)
        with torch.device("meta"):
            model = config.strategy_class.make_model(config)
        self.case, self.layers, self.axes = case, config.layers, config.axes
        self.n, self.t = self.axes.get("shard", 1), self.axes.get("tensor", 1)
        self.parameters = [4 * parameter.numel() for parameter in model.parameters()]
        self.whole, self.largest = sum(self.parameters), max(self.parameters)
        self.share, self.unit = self.of(model), self.of(model.blocks[0])
        stages = case.size if case.who == ("model", "pytorch") else self.axes.get("pipeline", 1)
        if stages > 1:
            layers = list(layers_of(model).values())
            ends = cut([count(layer) for layer in layers], stages)
            shares = [sum(map(self.of, layers[begin:end])) for begin, end in zip((0, *ends), ends, strict=False)]
            inner = list(self.axes.values())[[*self.axes, "pipeline"].index("pipeline") + 1 :]
            stage = case.rank // math.prod(inner) % stages  # ranks along the axes that vary faster have the same one
            self.share = max(shares) if case.who == ("model", "pytorch") else shares[stage]

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
    """In a step's last backward pass, the gradients of the passes before lie beside DDP's buckets, and those that
    arrive are added to them."""
    backward = {"parameters": s.share, "buckets": s.share, "averages": 2 * owned}
    backward |= {"gradients of passes before": s.share, "a gradient": s.largest}
    return buckets(s)[0], [backward, adamw(s.share, s.share, owned)]


def ddp_pytorch(s: Sizes) -> Said:
    return beside_buckets(s, s.share)


def replicas(s: Sizes, by_hand: bool) -> Said:
    """On the first device, at the end of a backward pass: the gradient of its own replica, and the sums, which are then
    added to the gradients. By hand, all copies of one parameter's arrive together; else one after the other."""
    step = {"parameters": s.whole, "averages": 2 * s.whole, "gradients": s.whole}
    more = {"a replica's": s.whole, "sums": s.whole, "arriving": s.largest * (s.case.size if by_hand else 1)}
    return [{"parameters": s.whole}], [step | more]


def tensor_pytorch(s: Sizes) -> Said:
    """A weight that is being cut is whole on the device, and once more as the parts that are sent."""
    return [{"parameters": s.share, "a weight and its parts": 2 * s.largest}], plain(s)[1]


def experts(s: Sizes) -> Said:
    """In the backward pass, the gradients of this rank's experts' two weights come one by one and are stacked then."""
    all_experts = 4 * s.layers * EXPERTS * (8 * WIDTH**2 + 5 * WIDTH)
    s.share += all_experts // s.axes["expert"] - all_experts
    weights = 2 * 4 * EXPERTS // s.axes["expert"] * 4 * WIDTH**2
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
    return beside_buckets(s, dealt[s.case.rank])


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
    if "data" in s.axes or s.case.strategy == "mesh":  # which is given two axes always, one of size 1 here
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


SAYS = {
    ("single", "pytorch"): plain,
    ("dp", "pytorch"): functools.partial(replicas, by_hand=False),
    ("dp", "by-hand"): functools.partial(replicas, by_hand=True),
    ("ddp", "pytorch"): ddp_pytorch,
    ("ddp", "by-hand"): buckets,
    ("model", "pytorch"): plain,
    ("model", "by-hand"): plain,
    ("tensor", "pytorch"): tensor_pytorch,
    ("tensor", "by-hand"): plain,
    ("sequence", "by-hand"): plain,
    ("context", "by-hand"): plain,
    ("ulysses", "by-hand"): plain,
    ("expert", "by-hand"): experts,
    ("pipeline", "pytorch"): plain,
    ("pipeline", "by-hand"): plain,
    ("pipeline+ddp", "pytorch"): buckets,
    ("pipeline+ddp", "by-hand"): plain,
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
