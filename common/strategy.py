"""The contract of a strategy: whatever spreads training over ranks looks like this from outside.

So one loop trains every strategy, one harness proves it, one table compares it.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from common.errors import UserError
from common.model import GPT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy:
    """Built from a model, a way to make an optimizer, and the ranks that it runs on.

    A chapter's subclass sets `model` (unwrapped) and `optimizer`, and writes `step`, which is its lesson.
    """

    data_rank, data_size = 0, 1  # which of how many equal slices of each global batch this rank reads
    model_class = GPT  # of text

    def __init__(self, ranks, precision: str = "fp32", max_norm: float = 1.0):
        """`precision` is "fp32", "bf16" or "fp16" (with loss scaling); gradients are clipped to `max_norm`, the
        2-norm over the whole model."""
        self.ranks, self.precision, self.max_norm = ranks, precision, max_norm
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=precision == "fp16")

    def autocast(self):
        """The context in which the forward pass computes in this run's precision."""
        return torch.autocast(self.ranks.device.type, DTYPES[self.precision], enabled=self.precision != "fp32")

    def step(self, micro_batches) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step on this rank's `micro_batches`, a list of (inputs, targets) of equal sizes.

        Returns the loss, a mean over the *global* batch, and the 2-norm of the whole model's gradient before
        clipping: two scalars, the same on every rank.
        """
        raise TypeError(f"{type(self).__name__} does not say how to step")

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def full_state(self) -> dict:
        """Parameters and optimizer state as one process would hold them, keyed by parameter name. Collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_full_state(self, state: dict) -> None:
        """Take up a state that `full_state` of any strategy gave. Collective; only rank 0's `state` counts."""
        # Sent whole and set everywhere: set_state_dict's own broadcast_from_rank0 sends tied weights from rank 0
        # that the other ranks do not wait for (torch 2.13; --check-collectives shows it).
        box = [state]
        dist.broadcast_object_list(box, src=0)
        state = self.own_part(box[0])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def own_part(self, state: dict) -> dict:
        """What this rank keeps of a full state."""
        return state


def require_precision(device: torch.device, precision: str) -> None:
    """Raise UserError for a precision that a device cannot compute in."""
    try:
        number = torch.ones(1, 1, dtype=DTYPES[precision], device=device)
        able = device.type != "cuda" or precision != "bf16" or torch.cuda.is_bf16_supported(including_emulation=False)
        number @ number
    except (RuntimeError, NotImplementedError):
        able = False
    if not able:
        raise UserError(f"--precision {precision}: {device} cannot multiply matrices in it; try another, or fp32")


def require_gradients(model: torch.nn.Module, without: set[torch.nn.Parameter] | None = None) -> None:
    """Raise UserError for trainable parameters that the backward pass did not reach: whoever averages gradients over
    ranks would wait for them, or leave them and their neighbours unaveraged.

    without: those parameters; by default all whose `grad` is None
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trained if (p.grad is None if without is None else p in without)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"parameter {missing[0]}{more} got no gradient in this step: use it in the forward pass, freeze it with "
            f"requires_grad_(False), or have unused parameters looked for"
        )
