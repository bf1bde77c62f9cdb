"""The contract of a strategy: whatever spreads training over ranks looks like this from outside.

So one loop trains every strategy, one harness proves it, one table compares it. docs/architecture.md explains it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common import mesh as meshes
from common import state as states
from common.errors import UserError
from common.model import GPT, cross_entropy
from common.options import StrategyOptions
from common.own import is_own

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """The ranks that a strategy runs on, and the settings that every strategy has.

    mesh:      named axes of ranks
    options:   an instance of the strategy's `Options`; None: their defaults
    precision: of the forward pass: "fp32", "bf16", or "fp16" with loss scaling
    max_norm:  the 2-norm of the whole model's gradient is clipped to this
    """

    mesh: DeviceMesh
    options: Any = None
    precision: str = "fp32"
    max_norm: float = 1.0


class Strategy:
    """Built as `strategy_class(model, make_optimizer, setup)`; `make_optimizer(parameters)` gives the optimizer.

    A chapter's subclass sets `model` (unwrapped) and `optimizer`, and writes `step`, which is its lesson. It declares

    preset:      the axes of its mesh where the user names none; -1 is the number of ranks that the others leave
    axes:        the axes that its mesh may have; by default those of `preset`
    data_axes:   of these, the axes whose ranks read different slices of each batch
    tasks:       what --task may be
    model_class: what it trains, of text
    from_meta:   whether it takes a model on the meta device on ranks other than 0, and gives them rank 0's weights
    Options:     a subclass of common.options.StrategyOptions, with its own options
    main:        a function of the run's configuration that trains, in the place of the chapter's
    uncounted:   what a dry run, which computes without numbers, cannot count: a sentence
    """

    preset: dict[str, int] = {"data": -1}
    axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ("data", "shard", "expert")
    tasks: tuple[str, ...] = ("text", "images")
    model_class = GPT
    from_meta = False
    Options: type[StrategyOptions] = StrategyOptions
    main: Callable | None = None
    uncounted = ""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, setup: Setup):
        self.mesh, self.device = setup.mesh, meshes.device_of(setup.mesh)
        self.options: Any = setup.options or self.Options()  # of the strategy's own class
        self.precision, self.max_norm = setup.precision, setup.max_norm
        along = meshes.axis(self.mesh, *self.data_axes)
        self.data_rank, self.data_size = along.rank, along.size  # which of how many equal slices of a batch it reads
        self.scaler = self.make_scaler()
        self.cut: dict = {}  # parameter -> (dimension, Axis) where a rank has one of the axis's equal chunks of it

    def make_scaler(self, group: dist.ProcessGroup | None = None) -> torch.amp.GradScaler:
        """What scales losses in fp16, skips the step when a gradient overflows, and is idle in other precisions.

        group: ranks that have different parts of the gradient. If it overflows on one of them, all skip the step.
        """
        enabled = self.precision == "fp16"
        if group is None or not enabled:
            return torch.amp.GradScaler(self.device.type, enabled=enabled)
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # not at the top: it loads FSDP

        scaler = ShardedGradScaler(self.device.type, process_group=group)
        scaler.scale(torch.zeros((), device=self.device))  # begins its work on ranks without a loss, too
        return scaler

    @classmethod
    def require(cls, config, axes: dict[str, int]) -> None:  # noqa: ARG003  for subclasses
        """Raise UserError for what cannot work with these settings on a mesh of these sizes. Ranks have not met yet."""
        if ("images" if is_own(config.task) else config.task) not in cls.tasks:  # a model of any kind
            raise UserError(f"--task {config.task}: strategy '{config.strategy}' divides a GPT; use --task text")
        config.options.require(config)

    @classmethod
    def make_model(cls, config) -> nn.Module:
        """The model of text that a run with these settings trains."""
        return cls.model_class(config.layers, config.width, config.heads, config.context)

    def autocast(self):
        """The context in which the forward pass computes in this run's precision."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    def step(self, micro_batches) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002  for subclasses
        """One optimizer step on this rank's `micro_batches`, a list of (inputs, targets) of equal sizes.

        Returns the loss, a mean over the *global* batch, and the 2-norm of the whole model's gradient before
        clipping: two scalars, the same on every rank.
        """
        raise TypeError(f"{type(self).__name__} does not say how to step")

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss over these examples, without gradients: a scalar, the same on all ranks that read them.

        What a step computes with must be as it was afterwards. Collective; ranks that read other examples may have
        more of them, or fewer.
        """
        with torch.no_grad(), self.autocast():
            return mean_loss(self.model(inputs), targets)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def parts(self) -> list[states.Part]:
        """This rank's elements of the whole model: how the state of this strategy is sharded."""
        return states.parts_of(self.model, self.cut)

    def optimizer_state(self) -> dict:
        """What the optimizer keeps, by parameter."""
        return self.optimizer.state

    def full_state(self) -> dict:
        """On rank 0, model and optimizer as one process would hold them, by parameter name, on the CPU; {} on the
        other ranks. Collective."""
        parts = self.parts()
        full, shared = states.gather(parts, self.optimizer_state()), self.global_state()
        trained = list(dict.fromkeys(full["state"])) or [part.name for part in parts if part.owner is not None]
        if dist.get_rank() > 0:
            return {}
        optimizer = {"state": full["state"], "param_groups": [shared["optimizer"] | {"params": trained}]}
        return {"model": full["model"], "optimizer": optimizer, "scaler": shared["scaler"]}

    def load_full_state(self, state: dict) -> None:
        """Take up a state that `full_state` of any strategy gave, on any mesh. Collective; only rank 0's `state`
        counts."""
        full = state and {"model": state["model"], "state": state["optimizer"]["state"]}
        states.scatter(full, self.parts(), self.optimizer_state())
        box = [state and (state["optimizer"]["param_groups"], state["scaler"])]
        dist.broadcast_object_list(box, src=0)
        groups, scaler = box[0]
        self.load_global_state({"optimizer": groups[0], "scaler": scaler})
        self.after_loading()

    def global_state(self) -> dict:
        """What all ranks have alike beside tensors: the optimizer's hyperparameters and the state of loss scaling."""
        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return {"optimizer": group, "scaler": self.scaler.state_dict()}

    def load_global_state(self, state: dict) -> None:
        """Take up what `global_state` of any strategy gave; JSON may have made lists of its tuples."""
        for group in self.optimizer.param_groups:
            for key, value in state["optimizer"].items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(value, list) else value
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def before_loading(self, first_batch: Callable[[], list]) -> None:
        """What a strategy has to do before a state is loaded, which overwrites what comes of it. `first_batch()` reads
        this rank's micro-batches of a step. Collective."""

    def after_loading(self) -> None:
        """What a strategy does when its parts have been written, such as gathering what it keeps whole."""


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, also of logits that are cut over ranks as a DTensor. Without gradients."""
    return cross_entropy((logits.full_tensor() if states.is_dtensor(logits) else logits).float(), targets)


def can_compute(device_type: str, precision: str) -> bool:
    try:
        number = torch.ones(1, 1, dtype=DTYPES[precision], device=device_type)
        number @ number
    except (RuntimeError, NotImplementedError):
        return False
    return device_type != "cuda" or precision != "bf16" or torch.cuda.is_bf16_supported(including_emulation=False)


def require_precision(device: torch.device, precision: str) -> None:
    """Raise UserError for a precision that a device cannot compute in."""
    if not can_compute(device.type, precision):
        raise UserError(f"--precision {precision}: {device} cannot multiply matrices in it; try another, or fp32")


def use_tf32(device: torch.device) -> None:
    """Have float32 matrices multiplied in TF32 from here on, in this process. Raises UserError for a device without."""
    if device.type != "cuda" or torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(f"--tf32: {device} has no TF32; NVIDIA's GPUs have it from A100 on: leave it out")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def require_gradients(model: nn.Module, without: set[nn.Parameter] | None = None) -> None:
    """Raise UserError for trainable parameters that the backward pass did not reach: whoever averages gradients over
    ranks would wait for them, or leave them and their neighbours unaveraged.

    without: those parameters; by default all whose `grad` is None
    """
    if without is not None and not without:
        return  # known already: to go through a model's names takes longer than a step of the loop around it
    missing = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (p.grad is None if without is None else p in without)
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"parameter {missing[0]}{more} got no gradient in this step: use it in the forward pass, freeze it with "
            f"requires_grad_(False), or have unused parameters looked for"
        )
