"""A task: what is learned, by which model, with which optimizer."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from common import data
from common.config import Config
from common.errors import UserError
from common.model import make_resnet
from common.own import data_of, file_of, first_line, function_of, is_own
from common.strategy import Strategy
from common.validation import EXAMPLES

Dataset = data.Text | data.Images | data.Own | data.OwnStream


@dataclass
class Task:
    """dataset: what is trained on; held_out: of a file of the user's, what is not"""

    dataset: Dataset
    config: Config
    held_out: data.Own | data.OwnStream | None = None

    def make_model(self) -> nn.Module:
        """The same weights for the same seed, on every rank and at every world size.

        Where the strategy sends rank 0's weights where they belong, the other ranks get it on the meta device, without
        memory.
        """
        c = self.config
        torch.manual_seed(c.seed)
        without_memory = c.strategy_class.from_meta and dist.is_initialized() and dist.get_rank() > 0
        with torch.device("meta") if without_memory else nullcontext():
            if c.task == "text":
                return c.strategy_class.make_model(c)
            if is_own(c.task):
                return own_model(c.task)
            pictures = cast(data.Images, self.dataset)  # by the check of --task
            return make_resnet(pictures.channels, pictures.classes)

    def make_optimizer(self, parameters) -> torch.optim.Optimizer:
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.config.lr, momentum=0.9)
        c = self.config
        betas, fused = (c.beta1, c.beta2), c.fused or None  # None: PyTorch's default, which is another on GPUs
        return torch.optim.AdamW(parameters, lr=c.lr, betas=betas, weight_decay=c.weight_decay, fused=fused)

    def micro_batches(self, step: int, strategy: Strategy) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank reads in step `step`, counted from 0."""
        return next(data.shard(self.dataset, self.plan(strategy), step))

    def validation_data(self) -> data.Text | data.Own:
        """What is not trained on. Raises UserError."""
        if not is_own(self.config.task):
            return data.validation_text(self.config.context, self.config.text)
        if self.held_out is None:
            raise UserError(f"--validate-every: --task {self.config.task} gives nothing to validate on")
        if isinstance(self.held_out, data.OwnStream):
            return data.Own(list(islice(self.held_out.examples, EXAMPLES)), self.held_out.where)
        return self.held_out

    def plan(self, strategy: Strategy) -> data.Plan:
        """What the run reads, and this rank's part of it."""
        c = self.config
        place = (strategy.data_rank, strategy.data_size)
        return data.Plan(c.seed, c.batch_size, c.steps * c.batch_size, *place, c.accumulation_steps, strategy.device)


def make_task(config: Config) -> Task:
    """What a run learns, from what; with --epochs, it says how many --steps that are. Raises UserError where the data
    is not there, or is less than one batch."""
    task = Task(*own_data(config)) if is_own(config.task) else Task(make_dataset(config), config)
    if config.epochs:
        config.steps = max(1, config.epochs * task.dataset.size // config.batch_size)
    if not isinstance(task.dataset, data.OwnStream) and config.batch_size > task.dataset.size:
        raise UserError(
            f"--batch-size {config.batch_size} is more than the {task.dataset.size} examples of the data; "
            f"make it {task.dataset.size} or less"
        )
    return task


def own_model(path: str) -> nn.Module:
    """The model of a file of the user's. Raises UserError."""
    try:
        model = function_of(file_of(path), "model")()
    except UserError:
        raise
    except Exception as error:  # it is the user's
        raise UserError(f"--task {path}: model() failed: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"--task {path}: model() should return a torch.nn.Module, and it gives {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--task {path}: nothing in the model is trained: no parameter wants a gradient")
    return model


def own_data(config: Config) -> tuple[data.Own | data.OwnStream, Config, data.Own | data.OwnStream | None]:
    """What Task is made of, from a file of the user's. Raises UserError."""
    where, name = f"--task {config.task}", data_of(config.task)
    try:
        found = function_of(file_of(config.task), name)()
    except UserError:
        raise
    except Exception as error:  # it is the user's
        raise UserError(f"{where}: {name}() failed: {first_line(error)}") from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(f"{where}: {name}() should return a pair, what is trained on and what is validated on, or None")
    training, held_out = found
    return data.own(training, where), config, None if held_out is None else data.own(held_out, where)


def make_dataset(config: Config) -> data.Text | data.Images:
    if config.task == "text":
        return data.training_text(config.context, config.text)
    if config.dataset == "digits":
        return data.digits()
    return data.torchvision_images(config.dataset, config.data_dir, config.download)


def check_batch(config: Config, data_size: int) -> None:
    """Raise UserError where the global batch cannot be cut into equal micro-batches of `data_size` slices."""
    parts = data_size * config.accumulation_steps
    if config.batch_size < parts:
        raise UserError(
            f"--batch-size {config.batch_size} is not one example for each of {data_size} data-parallel "
            f"rank(s) x {config.accumulation_steps} micro-batch(es) = {parts}; "
            f"make it {parts} or a multiple, or start fewer ranks"
        )
    if config.batch_size % parts:
        nearest = round(config.batch_size / parts) * parts
        raise UserError(
            f"--batch-size {config.batch_size} does not divide by {data_size} data-parallel rank(s) x "
            f"{config.accumulation_steps} micro-batch(es) = {parts}; the nearest that does is {nearest}"
        )
