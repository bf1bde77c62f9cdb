"""DistributedDataParallel by Hugging Face's Accelerate: the loop names no rank, no device and no collective.

`prepare` moves the model to this rank's device and wraps it; `accumulate`, `backward` and `clip_grad_norm_` know when
gradients have to be sent, scaled and averaged. `accelerate config` writes a YAML file of the same decisions, and
`accelerate launch` reads it (configs/engines/accelerate_ddp.yaml).

    pip install -r requirements-engines.txt
    torchrun --nproc_per_node=2 with_accelerate.py --distributed
    accelerate launch --config_file ../configs/engines/accelerate_ddp.yaml with_accelerate.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("ddp", "accelerate")

from common import quiet_engines  # noqa: F401  first

# isort: split
import itertools
import os
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader, IterableDataset

from common.config import take_over
from common.constants import PRECISIONS
from common.data import OwnStream, global_batch
from common.errors import UserError
from common.model import cross_entropy
from common.options import StrategyOptions, option
from course.ddp.options import ReplicatedModel


class DDPWithAccelerate(ReplicatedModel):
    """Every rank has the whole model; Accelerate wraps it in DistributedDataParallel."""

    @dataclass
    class Options(StrategyOptions):
        loading: str = option("shard", "who reads: each rank its part, or rank 0 for all", ("shard", "dispatch"))

        @property
        def load(self):
            """How Run.batches reads."""
            return FEEDING[self.loading]

    kind = "DDP"  # the file that `accelerate launch` may have read should be of this

    @classmethod
    def require(cls, config, axes):  # noqa: ARG003
        adopt(config, cls.kind)
        if config.precision == "fp16" and not torch.cuda.is_available():
            raise UserError("--precision fp16: Accelerate scales losses on GPUs only; try bf16, or fp32")

    def make_accelerator(self, **more) -> Accelerator:
        """What differs between strategies: with Accelerate, a strategy is an argument."""
        mixed = {"fp32": "no"}.get(self.precision, self.precision)
        return Accelerator(mixed_precision=mixed, cpu=self.device.type == "cpu", **more)

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        # By default a step ends with the loader too, whatever it has summed up by then. The course's loaders give the
        # micro-batches of a whole step at once: with the last of them, each micro-batch would be a step.
        plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
        self.model = model
        self.accelerator = self.make_accelerator(gradient_accumulation_plugin=plugin)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.model, make_optimizer(self.model.parameters()))
        self.scaler = self.accelerator.scaler or self.scaler

    def step(self, micro_batches):
        accelerator, loss = self.accelerator, 0.0
        accelerator.gradient_accumulation_steps = len(micro_batches)
        for inputs, targets in micro_batches:
            with accelerator.accumulate(self.wrapped):  # no_sync, but for the last micro-batch
                with accelerator.autocast():
                    part = cross_entropy(self.wrapped(inputs), targets)
                accelerator.backward(part)  # divides by gradient_accumulation_steps
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), self.max_norm)
                self.optimizer.step()  # this and the next line do nothing before the last micro-batch
                self.optimizer.zero_grad()
            loss += part.detach() / len(micro_batches)
        return accelerator.reduce(loss, reduction="mean"), getattr(grad_norm, "full_tensor", lambda: grad_norm)()

    def before_loading(self, first_batch):
        self.step(first_batch())  # after its first step DDP arranges its buckets anew, and then adds in another order


def adopt(config, kind: str) -> None:
    """Make what `accelerate launch` has read from its file the run's own settings, which config.json records. It hands
    them over in variables. Raises UserError for a file of another engine, and for one that contradicts an option."""
    given = os.environ
    used = [name for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM") if given.get(f"ACCELERATE_USE_{name}") == "true"]
    used = used or ["DDP"]
    launched = "ACCELERATE_MIXED_PRECISION" in given
    if launched and used != [kind]:
        advice = "use the file's own strategy and implementation" if kind in ("DDP", "FSDP") else "leave it out"
        raise UserError(f"accelerate launch: its file is for {used[0]}, and this training is {kind}; {advice}")
    found: dict[str, object] = {}
    if given.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        found["precision"] = given["ACCELERATE_MIXED_PRECISION"]
    elif launched and config.precision != "fp32":
        # The launcher hands over `no` for a file that is silent as well, and says so itself: which of the two it was,
        # nobody can tell from here. Training in bf16 beside a file that says `no` would be the worse mistake.
        raise UserError(
            f"accelerate launch: mixed_precision is 'no' in its file, or not in it, and --precision is "
            f"{config.precision}; say accelerate launch --mixed_precision {config.precision}, or write "
            f"mixed_precision: {config.precision} into the file"
        )
    if int(given.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)) > 1:
        found["accumulation_steps"] = int(given["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"])
    take_over(config, found, "accelerate launch: its file")
    if config.precision not in PRECISIONS:
        raise UserError(f"accelerate launch: its file has mixed_precision {config.precision}: take no, bf16 or fp16")


def through_accelerate(dispatch: bool):
    """A way to read, as in loading.py, with the DataLoader that `prepare` gives.

    With split_batches a batch is the global one, and each rank gets a slice; otherwise each rank gets batches of its
    own, one after the other, and the global batch grows with the number of ranks. With dispatch_batches rank 0 reads,
    and broadcasts each global batch *whole*; the other ranks keep their slices.
    """

    def load(dataset, plan, start=0):
        if isinstance(dataset, OwnStream):
            loader = DataLoader(Rest(dataset, start * plan.batch_size, plan.examples), plan.batch_size, drop_last=True)
        else:
            order = [global_batch(plan.seed, step, plan.batch_size, dataset.size) for step in range(start, plan.steps)]
            sampler = torch.cat(order).tolist()
            loader = DataLoader(Examples(dataset), plan.batch_size, sampler=sampler, drop_last=True)
        # What `accelerator.prepare(loader)` calls, with what DataLoaderConfiguration says.
        how = {"split_batches": True, "dispatch_batches": dispatch, "put_on_device": True}
        who = {"num_processes": plan.data_size, "process_index": plan.data_rank}
        for inputs, targets in prepare_data_loader(loader, torch.device(plan.device), **who, **how):
            yield plan.cut(inputs, targets)

    return load


@dataclass
class Examples:
    """A dataset of the course as DataLoader wants it: one example at a time."""

    dataset: object

    def __len__(self):
        return self.dataset.size

    def __getitem__(self, index):
        inputs, targets = self.dataset.batch(torch.tensor([index]))
        return inputs[0], targets[0]


@dataclass
class Rest(IterableDataset):
    """A stream from one example to another."""

    dataset: OwnStream
    begin: int
    end: int

    def __iter__(self):
        return itertools.islice(self.dataset, self.begin, self.end)


FEEDING = {"shard": through_accelerate(dispatch=False), "dispatch": through_accelerate(dispatch=True)}

if __name__ == "__main__":
    start()
