"""What is kept of each step of a run, and shown of it: metrics, losses on other text, reports of the ranks."""

import math
import sys
import time

import torch
from tqdm import tqdm

from common.config import Config
from common.errors import UserError
from common.meter import Usage
from common.per_rank import PerRank
from common.run_dir import OtherRank, RunDirectory
from common.strategy import Strategy
from common.task import Task
from common.validation import validate


class Record:
    """The metrics of a run, its progress bar, and the lines that rank 0 prints. Making it and `log` are collective."""

    def __init__(self, config: Config, strategy: Strategy, task: Task, directory: RunDirectory | OtherRank, done: int):
        """`done` is the number of steps that the run has behind it."""
        self.config, self.strategy, self.directory = config, strategy, directory
        self.unit = task.dataset.unit
        self.per_step = config.batch_size * (config.context if config.task == "text" else 1)  # units of a step
        self.validation = task.validation_data() if config.validate_every else None
        self.usage = Usage(config, strategy.device) if directory.writes else None
        often = 0.1 if sys.stderr.isatty() else 10.0  # in a log file each refresh is a line of its own
        self.bar = tqdm(total=config.steps, initial=done, unit="step", disable=not directory.writes, mininterval=often)
        self.per_rank = PerRank(strategy.device)
        self.waiting: dict | None = None  # what was logged last, until it is written
        self.begin = time.perf_counter()

    def begin_step(self) -> None:
        """A step lasts from one log to the next, or from here: without validation, reports and checkpoints."""
        self.begin = time.perf_counter()

    def log(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """Note what step `step` gave, counted from 0.

        On a GPU the numbers are read one step later: `.item()` waits for the device, which by then has the next step
        to do.
        """
        self.write()
        self.waiting = {"step": step + 1, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        at_once = loss.device.type == "cpu"  # there is nothing to wait for
        if at_once:
            read(self.waiting, self.config.lr)
        now = time.perf_counter()
        self.waiting["step_seconds"], self.begin = now - self.begin, now
        self.per_rank.step_ended()
        if self.per_rank.due(step + 1, self.config.log_every):
            rows, warnings = self.per_rank.report()
            self.waiting |= {"ranks": rows}
            for text in warnings:
                print_line(text)
            self.begin_step()
        if self.validation and (step + 1 == self.config.steps or (step + 1) % self.config.validate_every == 0):
            batch = self.config.validate_batch_size or self.config.batch_size // self.config.accumulation_steps
            examples = max(1, batch // self.strategy.data_size)
            self.waiting["validation_loss"] = validate(self.strategy, self.validation, examples)
            self.begin_step()
        if at_once:
            self.write()

    def write(self) -> None:
        """Write the step that was logged last, if it has not been written."""
        if self.waiting is None:
            return
        record, self.waiting = self.waiting, None
        if isinstance(record["loss"], torch.Tensor):
            read(record, self.config.lr)
        if self.usage is None:
            return
        done, steps, speed = record["step"], self.config.steps, self.per_step / record["step_seconds"]
        self.directory.log({**record, f"{self.unit}_per_second": speed, **self.usage(record["step_seconds"])})
        self.bar.update()
        self.bar.set_postfix_str(f"loss {record['loss']:.3f}", refresh=False)
        if done % self.config.log_every == 0 or done == steps:
            print_line(f"step {done}/{steps}  loss {record['loss']:.4f}  {speed:,.0f} {self.unit}/s")
        if "validation_loss" in record:
            print_line(f"step {done}/{steps}  validation loss {record['validation_loss']:.4f}")

    def close(self) -> None:
        self.bar.close()


def read(record: dict, lr: float) -> None:
    """Turn a step's tensors into numbers, which waits for the device. Raises UserError for a loss that is none."""
    record["loss"], record["grad_norm"] = float(record["loss"]), float(record["grad_norm"])
    if not math.isfinite(record["loss"]):
        raise UserError(f"the loss is {record['loss']} at step {record['step']}; try a smaller --lr than {lr}")
    if not math.isfinite(record["grad_norm"]):
        # fp16's loss scaling overflows now and then, and skips that step: JSON has no infinity
        record["grad_norm"] = None


def print_line(text: str) -> None:
    """A line on stderr that leaves the progress bar whole."""
    tqdm.write(text, file=sys.stderr)
