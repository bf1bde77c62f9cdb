"""Where a model is cut into stages, at places that are named, or balanced by parameters or by measured time; and what
a rank keeps of it."""

import contextlib
import copy
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from common.collectives import broadcast_module, leave_meta
from common.did_you_mean import did_you_mean
from common.errors import UserError
from common.mesh import same_timeout
from common.model import cross_entropy
from common.state import local_of
from course.model_parallel.by_hand_layers import TIED, count, cut, layers_of
from course.pipeline import simulator


@dataclass
class OwnStages:
    """What a rank of a pipeline has of a model.

    model:           the model without the layers of other ranks; what is left keeps its names
    modules:         this rank's stages: number -> its layers in a row
    names:           of the layers of every stage of the whole model
    rank_of:         the rank of every stage, within the pipeline
    first, last:     whether the model's first and last stage are here
    width, dtype:    of what one stage hands to the next. Under autocast the dtype is still that of the parameters:
                     blocks add their results, in bf16, to a sum that isn't
    embedding_group: the two ranks that have the embedding and the output layer, where these are one weight on two
                     ranks; on all other ranks, and where there is no such weight, None
    """

    model: nn.Module
    modules: dict[int, nn.Sequential]
    names: list[list[str]]
    rank_of: list[int]
    first: bool
    last: bool
    width: int
    dtype: torch.dtype
    embedding_group: dist.ProcessGroup | None

    @property
    def tied(self) -> nn.Parameter | None:
        """This rank's copy of the weight that two ranks have. Looked up anew, since wrappers may replace parameters."""
        if self.embedding_group is None:
            return None
        return self.model.get_parameter("embedding.tokens.weight" if self.first else "head.out.weight")

    def add_tied_gradients(self) -> None:
        """Embedding and output layer are one tensor of the whole model: its gradient is the sum over both places.

        With equal weights, gradients and optimizer states the first and the last rank's copies stay equal
        (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, do it so too).
        Of a DTensor both ranks have the same shard.
        """
        if self.tied is not None and self.tied.requires_grad:
            assert self.tied.grad is not None  # the backward pass is over
            dist.all_reduce(local_of(self.tied.grad), group=self.embedding_group)

    @torch.no_grad()
    def evaluate(self, modules, pipeline, inputs, loss, context=contextlib.nullcontext) -> torch.Tensor:
        """loss(output of the last stage) on all ranks of the pipeline; inputs [batch, time] go through one stage after
        the other, once, and nothing is kept for a backward pass. Collective.

        modules:  this rank's stages as they are called, by number
        pipeline: the Axis of ranks that share the model
        """
        x, last = inputs, len(self.rank_of) - 1
        for number, module in sorted(modules.items()):
            if number > 0 and self.rank_of[number - 1] != pipeline.rank:
                x = torch.empty((*inputs.shape, self.width), dtype=self.dtype, device=inputs.device)
                dist.recv(x, group=pipeline.group, group_src=self.rank_of[number - 1])
            with context():
                x = module(x)
            if number < last and self.rank_of[number + 1] != pipeline.rank:
                x = x.to(self.dtype)  # fully_shard may have been told to compute in 16 bits
                dist.send(x.contiguous(), group=pipeline.group, group_dst=self.rank_of[number + 1])
        total = loss(x).float() if self.last else torch.zeros((), device=inputs.device)
        dist.broadcast(total, group=pipeline.group, group_src=self.rank_of[-1])
        return total

    def gradients(self) -> list[torch.Tensor]:
        """All gradients that this rank has."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def gradients_for_norm(self) -> list[torch.Tensor]:
        """The same, but for the last rank's copy of a tied weight: in the norm of the whole model it counts once."""
        twice = self.tied if self.last else None
        return [p.grad for p in self.model.parameters() if p.grad is not None and p is not twice]

    def parts(self, parts: list) -> list:
        """The parts of a strategy's state, with the names that they have in the whole model."""
        if self.embedding_group is None:
            return parts
        return [replace(p, name=TIED[0], aliases=TIED[1:]) if p.name in TIED else p for p in parts]


def own_stages(
    model, schedule, pipeline, spec="auto", device=None, context=contextlib.nullcontext, everyone=None
) -> OwnStages:
    """Cut a GPT into the stages of a schedule, and keep this rank's alone; only those are moved to the device.

    model:    on the CPU, equal on all ranks, where its layers may have been cut by tensor parallelism; or, with
              `everyone`, as each rank of that group made it, and perhaps on the meta device
    schedule: without messages (schedules.py), for the ranks of the pipeline
    pipeline: the Axis of ranks that share the model
    spec:     as for stages_of, or the names that it gave. Several pipelines have to be cut alike: let stages_of measure
              over all of their ranks, before tensor parallelism cuts layers
    device:   by default the CPU
    context:  in which stages will compute, for measuring them
    everyone: a process group, from whose rank 0 all weights are taken, one after the other; so a rank that was given a
              model without memory never has more of it than its stages and one weight

    Collective where embedding and output layer share a weight and where time is measured. Raises UserError.
    """
    device = device or torch.device("cpu")
    rank_of = simulator.placement(schedule)
    if spec == "auto-time" and dist.get_world_size(dist.group.WORLD) > pipeline.size:
        raise UserError(
            "--split-spec auto-time: several pipelines have to be cut alike, so stages_of must measure over all of "
            "their ranks; with this strategy take auto, or name the places"
        )
    names = stages_of(model, len(rank_of), spec, pipeline.group, device, context) if isinstance(spec, str) else spec
    layers = layers_of(model)
    width = model.head.norm.normalized_shape[0]  # norms are not cut, whatever happened to the weights
    dtype = model.embedding.positions.weight.dtype
    first, last = (rank_of[end] == pipeline.rank for end in (0, -1))
    tied = model.head.out.weight is model.embedding.tokens.weight
    embedding_group = None
    if tied and rank_of[0] != rank_of[-1]:
        ends = [dist.get_global_rank(pipeline.group, rank_of[end]) for end in (0, -1)]
        # Its members alone make a group. PyTorch names it by its ranks and by how many groups this process has: so that
        # all ranks have equally many, one between the ends makes one of its own.
        made = dist.new_group(ends if first or last else [dist.get_rank()], use_local_synchronization=True)
        embedding_group = made if first or last else None
        same_timeout(made)
    here = {number: stage for number, stage in enumerate(names) if rank_of[number] == pipeline.rank}
    own = [name for stage in here.values() for name in stage]
    if everyone is not None:
        leave_meta(model, torch.device("cpu"))
        kept = {parameter for name in own for parameter in layers[name].parameters()}
        broadcast_module(model, everyone, own=kept)
    for name in set(layers) - set(own):
        model.set_submodule(name, nn.Identity())
    model.to(device)
    modules = {number: nn.Sequential(*(layers[name] for name in stage)) for number, stage in here.items()}
    return OwnStages(model, modules, names, rank_of, first, last, width, dtype, embedding_group)


def stages_of(
    model, stages: int, spec="auto", group=None, device=None, context=contextlib.nullcontext
) -> list[list[str]]:
    """The names of the layers in each stage, in order.

    spec: "auto" (the largest stage has as few parameters as can be), "auto-time" (the slowest is as fast as can be, as
          rank 0 of `group` measures it on `device`, in `context`; collective, and not for layers that talk to other
          ranks themselves), or places as `named` reads them

    Raises UserError.
    """
    layers = layers_of(model)
    if spec not in ("auto", "auto-time"):
        ends = named(spec, list(layers), stages)
    else:
        require_layers(len(layers), stages)
        costs: list[float] = [count(layer) for layer in layers.values()]
        if spec == "auto-time":
            costs = measured_on_rank_0(model, group, device or torch.device("cpu"), context)
        ends = cut(costs, stages)
    return [list(layers)[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]


def require_spec(spec: str, blocks: int, stages: int) -> None:
    """Raise UserError where a GPT of so many blocks is not cut into so many stages by `spec`."""
    names = ["embedding", *(f"blocks.{number}" for number in range(blocks)), "head"]
    if spec not in ("auto", "auto-time"):
        named(spec, names, stages)
    require_layers(len(names), stages)


def require_layers(layers: int, stages: int) -> None:
    if stages > layers:
        raise UserError(
            f"{stages} stages are more than {layers} layers (embedding, {layers - 2} blocks, head), and each needs "
            f"one; make --layers {stages - 2}, or have fewer stages"
        )


def named(spec: str, layers: list[str], stages: int) -> tuple[int, ...]:
    """Read places such as "blocks.3: end" or "blocks.1: beginning, head: beginning": for each stage, the number of its
    last layer plus one. Raises UserError for what is no place, and where they do not make so many stages."""
    cuts = set()
    for place in spec.split(","):
        name, _, side = (part.strip() for part in place.partition(":"))
        if name not in layers:
            raise UserError(f"--split-spec: the model has no layer '{name}'; {did_you_mean(name, layers, cutoff=0.0)}")
        if side not in ("beginning", "end"):
            raise UserError(f"--split-spec: '{place.strip()}': write '{name}: beginning' or '{name}: end'")
        cuts.add(layers.index(name) + (side == "end"))
    if cuts & {0, len(layers)}:
        raise UserError(f"--split-spec: there is nothing to cut off before {layers[0]} or after {layers[-1]}")
    if len(cuts) + 1 != stages:
        raise UserError(
            f"--split-spec: {len(cuts)} cut(s) make {len(cuts) + 1} stages, but ranks x stages per rank are {stages}; "
            f"name {stages - 1} place(s)"
        )
    return (*sorted(cuts), len(layers))


def measured_on_rank_0(model, group, device, context=contextlib.nullcontext) -> list[float]:
    """What `measured` says on rank 0 of the group, on all of its ranks. Collective."""
    seconds = torch.zeros(len(layers_of(model)), device=device)
    if dist.get_rank(group) == 0:
        seconds = torch.tensor(measured(model, device, context), device=device)
    dist.broadcast(seconds, group=group, group_src=0)
    return seconds.tolist()


def measured(model, device, context=contextlib.nullcontext, rounds: int = 3) -> list[float]:
    """Seconds that each layer takes on the device for forward and backward of 4 examples: the shortest of some rounds.
    The head's include the loss. Only one layer at a time is on the device, as a copy."""
    tokens = torch.zeros(4, model.embedding.positions.num_embeddings, dtype=torch.long, device=device)
    seconds, x = [], tokens
    for name, layer in layers_of(model).items():
        layer = copy.deepcopy(layer).to(device)
        best = float("inf")
        for _ in range(rounds):
            if x is not tokens:
                x = x.detach().requires_grad_()
            leaves = [leaf for leaf in (*layer.parameters(), x) if leaf.requires_grad]
            synchronize(device)
            begin = time.perf_counter()
            with context():
                y = layer(x)
                out = cross_entropy(y.float(), tokens) if name == "head" else y
            if out.requires_grad:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
            synchronize(device)
            best = min(best, time.perf_counter() - begin)
        seconds.append(best)
        x = y
    return seconds


def synchronize(device) -> None:
    """Wait until the device has computed what it was given. The CPU has, always."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
