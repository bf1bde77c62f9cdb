"""FSDP by Hugging Face's Accelerate: the loop of 03_ddp/with_accelerate.py, and one argument more.

pip install -r requirements-engines.txt
torchrun --nproc_per_node=2 with_accelerate.py --distributed
accelerate launch --config_file ../configs/engines/accelerate_fsdp2.yaml with_accelerate.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("fsdp", "accelerate")

import os
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from common.collectives import broadcast_module
from common.errors import UserError
from common.mesh import axis
from common.model import blocks_of
from common.options import StrategyOptions, option
from course.ddp.with_accelerate import DDPWithAccelerate

LAUNCHED = "ACCELERATE_USE_FSDP" in os.environ  # by `accelerate launch`, which hands its YAML over in variables


class FSDPWithAccelerate(DDPWithAccelerate):
    """ZeRO stage 3: `prepare` calls fully_shard on each block and on the model, and gives the optimizer the shards."""

    preset = {"shard": -1}
    from_meta = True
    kind = "FSDP"

    @dataclass
    class Options(StrategyOptions):
        offload: bool = option(False, "keep shards and optimizer in host memory")

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        config.options.offload |= LAUNCHED and os.environ.get("FSDP_OFFLOAD_PARAMS") == "true"
        if config.options.offload and not torch.cuda.is_available():
            raise UserError("--offload: Accelerate takes it on GPUs; without one there is nothing to offload from")

    def __init__(self, model, make_optimizer, setup):
        # fully_shard cuts what each rank has: so all have to begin with rank 0's weights. (Accelerate's own way,
        # cpu_ram_efficient_loading, asks the model to tie its weights again, by a method that Transformers' have.)
        broadcast_module(model, axis(setup.mesh, "shard").group, torch.device("cpu"))
        super().__init__(model, make_optimizer, setup)

    def before_loading(self, first_batch):
        pass  # no DDP here

    def make_accelerator(self, **more):
        blocks = sorted({type(block).__name__ for block in blocks_of(self.model)})  # each is gathered by itself
        settings = {
            "fsdp_version": 2,
            "auto_wrap_policy": "transformer_based_wrap" if blocks else "no_wrap",
            "transformer_cls_names_to_wrap": blocks or None,
            "reshard_after_forward": True,
            "cpu_offload": self.options.offload,
            "cpu_ram_efficient_loading": False,
        }
        plugin = FullyShardedDataParallelPlugin(**({} if LAUNCHED else settings))
        return on_cpu(super().make_accelerator(fsdp_plugin=plugin, **more), plugin)


def on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> Accelerator:
    """An accelerator that shards on CPUs too.

    Accelerate 1.15 looks at the plugin where it has found GPUs. On CPUs it leaves it aside without a word, and trains
    with DistributedDataParallel. So it is told here what it would have found.
    """
    if accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    return accelerator


if __name__ == "__main__":
    start()
