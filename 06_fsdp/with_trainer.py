"""FSDP by the Trainer of Hugging Face's Transformers: no loop at all, but a list of arguments.

The Trainer has a loop of its own, on Accelerate, and calls back at its stations. What it decides by itself and the
course decides otherwise stands in CourseTrainer: each method there is a default that is not ours.

    pip install -r requirements-engines.txt
    torchrun --nproc_per_node=2 with_trainer.py --distributed
    accelerate launch --config_file ../configs/engines/accelerate_fsdp2.yaml with_trainer.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("fsdp", "trainer")

import common.vision  # noqa: F401  first: transformers imports torchvision
from common import quiet_engines  # noqa: F401

# isort: split
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, default_collate
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from common.collectives import broadcast_module
from common.data import global_batch
from common.learning_rate import learning_rate
from common.mesh import axis, make_mesh
from common.model import blocks_of, cross_entropy
from common.options import StrategyOptions
from common.ranks import process_group
from common.run import Run
from common.strategy import Strategy
from common.task import check_batch, make_task
from course.ddp.with_accelerate import Examples, adopt
from course.fsdp.with_accelerate import on_cpu


class CourseTrainer(Trainer):
    """The Trainer, with the course's loss, optimizer, learning rate and order of examples."""

    def __init__(self, task, **arguments):
        self.task, self.done = task, 0  # steps that a resumed run has behind it
        super().__init__(**arguments)

    def compute_loss(self, model, inputs, **_):
        """The Trainer would take the `loss` that a model of Transformers gives, when it gets `labels`."""
        inputs, targets = inputs
        return cross_entropy(model(inputs), targets)

    def create_optimizer(self, model=None):
        """The Trainer would make AdamW with two groups, and let weights alone decay: no biases and no LayerNorms."""
        if self.optimizer is None:
            self.optimizer = self.task.make_optimizer((model or self.model).parameters())
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):  # noqa: ARG002  called by name
        """The Trainer would let the rate fall linearly to zero."""
        config = self.task.config
        rate = LambdaLR(optimizer or self.optimizer, lambda step: learning_rate(config, self.done + step) / config.lr)
        self.lr_scheduler, self._created_lr_scheduler = rate, True
        return rate

    def create_accelerator_and_postprocess(self):
        """On CPUs, Accelerate would leave FSDP aside."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args:
            from accelerate.utils import FullyShardedDataParallelPlugin

            on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = True

    def begin_at(self, done: int) -> None:
        """Go on after so many steps. (The Trainer's own `resume_from_checkpoint` reads checkpoints of its own.)"""
        examples: Any = self.train_dataset
        optimizer: Any = self.optimizer  # both are there by now
        self.done = examples.begin = done
        self.state.global_step = self._globalstep_last_logged = done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.task.config, done)


class InOrder(Dataset):
    """The examples of all steps, in the order in which they are read, from step `begin` on."""

    begin = 0

    def __init__(self, task):
        config, self.examples = task.config, Examples(task.dataset)
        batches = [global_batch(config.seed, s, config.batch_size, task.dataset.size) for s in range(config.steps)]
        self.order, self.batch_size = torch.cat(batches).tolist(), config.batch_size

    def __len__(self):
        return len(self.order)

    def __getitem__(self, number):
        return self.examples[self.order[(self.begin * self.batch_size + number) % len(self.order)]]


class Follow(TrainerCallback):
    """Lets a run of the course look on: metrics, checkpoints, Ctrl-C; and take up the one that is resumed, once the
    model is sharded. `stack` is left when the training is over."""

    def __init__(self, trainer, strategy, stack):
        self.trainer, self.strategy, self.stack = trainer, strategy, stack

    def on_train_begin(self, *_, optimizer=None, **__):
        task, self.strategy.optimizer = self.trainer.task, optimizer
        self.run = self.stack.enter_context(Run(task.config, self.strategy, task))
        self.trainer.begin_at(self.run.steps.start)

    def on_log(self, _args, _state, control, logs=None, **_):
        if "loss" in logs:
            loss, grad_norm = (torch.tensor(float(logs[name])) for name in ("loss", "grad_norm"))
            control.should_training_stop |= self.run.end_step(loss, grad_norm)


class FSDPWithTrainer(Strategy):
    """What the command line and the checkpoints know of this training; its loop is the Trainer's."""

    preset = {"shard": -1}
    Options = StrategyOptions
    from_meta = True

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        adopt(config, "FSDP")

    @staticmethod
    def main(config):
        main(config)


def main(config):
    with process_group(config.device, config.backend, config.timeout, config.check_collectives) as ranks:
        task = make_task(config)
        mesh = make_mesh(config.axes, ranks.device.type)
        strategy = FSDPWithTrainer(config.setup(mesh))
        check_batch(config, strategy.data_size)
        strategy.model = model = task.make_model()
        broadcast_module(model, axis(mesh, "shard").group, torch.device("cpu"))
        blocks = sorted({type(block).__name__ for block in blocks_of(model)})  # each of these is gathered by itself
        arguments = TrainingArguments(
            output_dir=str(config.run_dir),
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size // strategy.data_size // config.accumulation_steps,
            gradient_accumulation_steps=config.accumulation_steps,
            max_grad_norm=config.max_norm,
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            fsdp=ranks.size > 1,
            fsdp_config={
                "version": 2,
                "reshard_after_forward": True,
                **({"transformer_layer_cls_to_wrap": blocks} if blocks else {"auto_wrap_policy": "NO_WRAP"}),
            },
            use_cpu=ranks.device.type == "cpu",
            train_sampling_strategy="sequential",  # the order of the examples is ours
            dataloader_pin_memory=ranks.device.type != "cpu",
            remove_unused_columns=False,
            save_strategy="no",  # checkpoints are those of the course
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        how = {"args": arguments, "train_dataset": InOrder(task), "data_collator": default_collate}
        with ExitStack() as stack:
            trainer = CourseTrainer(task, model=model, **how)
            trainer.remove_callback(PrinterCallback)  # the run prints its steps itself
            trainer.add_callback(Follow(trainer, strategy, stack))
            trainer.train()


if __name__ == "__main__":
    start()
