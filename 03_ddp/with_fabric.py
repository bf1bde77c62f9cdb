"""DistributedDataParallel by Lightning Fabric: PyTorch's loop, in which a few calls go through a Fabric object.

`setup` moves and wraps, `backward` scales, `no_backward_sync` waits with sending; when to step stays in the loop.

    pip install -r requirements-engines.txt
    torchrun --nproc_per_node=2 with_fabric.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("ddp", "fabric")

import common.vision  # noqa: F401  first: lightning imports torchvision

# isort: split
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from common.model import cross_entropy
from common.ranks import environment
from common.recompute import recompute_blocks
from course.ddp.options import ReplicatedModel

PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class DDPWithFabric(ReplicatedModel):
    """Every rank has the whole model; Fabric wraps it in DistributedDataParallel."""

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        _, size, _, local_size = environment()
        self.fabric = Fabric(
            accelerator="cpu" if self.device.type == "cpu" else "cuda",
            devices=local_size,
            num_nodes=size // local_size,
            strategy=DDPStrategy(gradient_as_bucket_view=True),
            precision=PRECISION[self.precision],
        )
        self.fabric.launch()  # finds that torchrun has started the ranks
        self.model = recompute_blocks(model, self.options.recompute)
        self.wrapped, self.optimizer = self.fabric.setup(self.model, make_optimizer(model.parameters()))
        self.scaler = getattr(self.fabric._precision, "scaler", None) or self.scaler

    def step(self, micro_batches):
        loss = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            with self.fabric.no_backward_sync(self.wrapped, enabled=number < len(micro_batches)):
                part = cross_entropy(self.wrapped(inputs), targets) / len(micro_batches)
                self.fabric.backward(part)
            loss += part.detach()
        grad_norm = self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.fabric.all_reduce(loss, reduce_op="mean"), grad_norm

    def before_loading(self, first_batch):
        self.step(first_batch())  # after its first step DDP arranges its buckets anew, and then adds in another order


if __name__ == "__main__":
    start()
