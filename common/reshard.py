"""Parameters that fully_shard has gathered, and that no backward pass will free."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Free what is gathered, in all units of `model`: after a forward pass that no backward pass follows, the last
    units are. (`FSDPModule.reshard` frees one unit alone.)"""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
