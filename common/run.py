"""A run as the training loop sees it: which steps to do, their batches and learning rates, and what is kept of them.

The loop itself is in each chapter's script:

    with Run(config, strategy, task) as run:
        batches = run.batches()
        for step in run.steps():
            strategy.set_learning_rate(run.learning_rate(step))
            loss, grad_norm = strategy.step(next(batches))
            run.log(step, loss, grad_norm)
"""

import contextlib
import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import data, manifest
from common.config import Config, shared
from common.errors import INTERRUPTED, UserError, repeat_below_torchrun
from common.learning_rate import learning_rate
from common.meter import Usage
from common.options import flag
from common.per_rank import PerRank
from common.ranks import silent
from common.run_dir import RunDirectory, this_launch
from common.sample import sample
from common.strategy import Strategy, require_precision
from common.task import Task, check_batch
from common.validation import validate


class Run:
    """Progress, stopping, metrics and checkpoints of one training run; entered on every rank.

    Takes up a checkpoint where the run goes on. Leaving it normally closes the run directory; after Ctrl-C or
    SIGTERM it exits with code INTERRUPTED. Raises UserError for a batch that cannot be divided, a precision that the
    device does not have, a resumed run that has all its steps behind it, a run directory that cannot be written, a
    loss that is no number, and when another rank has died.
    """

    def __init__(self, config: Config, strategy: Strategy, task: Task):
        check_batch(config, strategy)
        require_precision(strategy.device, config.precision)
        self.config, self.strategy, self.task = config, strategy, task
        self.main_rank, self.size = dist.get_rank() == 0, dist.get_world_size()
        launches = [""] * self.size
        dist.all_gather_object(launches, this_launch())
        self.directory = RunDirectory(config, self.size, launches) if self.main_rank else None
        self.per_step = config.batch_size * (config.context if config.task == "text" else 1)
        self.stop_asked, self.vote, self.waiting, self.logged, self.saved = False, None, None, 0, None
        self.loaders = contextlib.ExitStack()
        self.validation = task.validation_text() if config.validate_every else None
        self.meter = Usage(config, strategy.device) if self.main_rank else None

    def __enter__(self) -> "Run":
        from common.checkpoint import Saver  # not at the top: it takes half a second, and not every command gets here

        config = self.config
        self.done, self.saver = self._resume(), Saver(config.async_checkpoint)
        if config.resume and not self.restarted and self.done >= config.steps:
            done = f"--resume: {self.path} has its {self.done} steps behind it, so there is nothing to do"
            raise UserError(f"{done}; ask for more with --steps {2 * self.done}")
        if self.main_rank:
            if self.directory.goes_on:
                self.directory.forget_after(self.done)
            if config.tensorboard:
                self.directory.write_board(self.done)
            tell(f"{config.strategy} on {self.size} process(es), {self.strategy.device.type}: {self.path}")
            if self.restarted or self.done:
                tell(f"{'restarted by torchrun: ' * self.restarted}going on after step {self.done}")
            if self.size > 1 and config.entry and config.entry.sizes(config.implementation) == (1,):
                alike = f"all {self.size} ranks train the same model on the same data"
                tell(f"note: strategy '{config.strategy}' divides nothing between processes: {alike}")
        often = 0.1 if sys.stderr.isatty() else 10.0  # in a log file each refresh is a line of its own
        self.bar = tqdm(
            total=config.steps, initial=self.done, unit="step", disable=not self.main_rank, mininterval=often
        )
        self.per_rank = PerRank(self.strategy.device)
        numbers = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what torchrun and Slurm send
        self.handlers = {number: signal.signal(number, self._ask_to_stop) for number in numbers}
        return self

    def steps(self) -> Iterator[int]:
        """The steps that are still to be done, counted from 0, until --steps or until a rank has been asked to stop."""
        config, every = self.config, self.config.checkpoint_every
        self.begin = time.perf_counter()  # a step lasts from one log to the next, but for writing checkpoints
        while self.done < config.steps:
            yield self.done
            if self.logged != self.done + 1:
                raise RuntimeError(f"step {self.done} was not logged: call run.log in every step")
            self.done += 1
            stopping = self._somebody_asked_to_stop()
            if stopping or self.done == config.steps or (every and self.done % every == 0):
                self._save()
                self.begin = time.perf_counter()
            if stopping:
                break

    def batches(self, load=data.shard) -> Iterator[list]:
        """This rank's micro-batches from the next step on. `load(dataset, plan, start)` is how they are read; the time
        that a step waits for them counts in its step_seconds."""
        batches = load(self.task.dataset, self.task.plan(self.strategy), self.done)
        return self.loaders.enter_context(contextlib.closing(batches))

    def learning_rate(self, step: int) -> float:
        """Of step `step`, counted from 0."""
        return learning_rate(self.config, step)

    def log(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Note what a step gave.

        On a GPU the numbers are read one step later: `.item()` waits for the device, which by then has the next step
        to do.
        """
        self._write()
        rate, self.logged = self.learning_rate(step), step + 1
        self.waiting = {"step": step + 1, "loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
        if loss.device.type == "cpu":
            self._read()  # there is nothing to wait for
        now = time.perf_counter()
        self.waiting["step_seconds"], self.begin = now - self.begin, now
        self.per_rank.step_ended()
        if self.per_rank.due(step + 1, self.config.log_every):
            rows, warnings = self.per_rank.report()
            self.waiting |= {"ranks": rows}
            for text in warnings:
                tell(text)
            self.begin = time.perf_counter()
        if self.validation and (step + 1 == self.config.steps or (step + 1) % self.config.validate_every == 0):
            at_once = self.config.batch_size // self.strategy.data_size // self.config.accumulation_steps
            self.waiting["validation_loss"] = validate(self.strategy, self.validation, at_once)
            self.begin = time.perf_counter()
        if loss.device.type == "cpu":
            self._write()

    def _read(self) -> None:
        """Turn the step's tensors into numbers, which waits for the device. Raises UserError for a loss that is not."""
        record = self.waiting
        record["loss"], record["grad_norm"] = float(record["loss"]), float(record["grad_norm"])
        if not math.isfinite(record["loss"]):
            raise UserError(
                f"the loss is {record['loss']} at step {record['step']}; try a smaller --lr than {self.config.lr}"
            )
        if not math.isfinite(record["grad_norm"]):
            # fp16's loss scaling overflows now and then, and skips that step: JSON has no infinity
            record["grad_norm"] = None

    def _write(self) -> None:
        """Write the step that was logged last, if it has not been written."""
        if self.waiting is None:
            return
        self._read() if isinstance(self.waiting["loss"], torch.Tensor) else None
        record, self.waiting = self.waiting, None
        if self.main_rank:
            unit, done, steps = self.task.dataset.unit, record["step"], self.config.steps
            speed = self.per_step / record["step_seconds"]
            self.directory.log({**record, f"{unit}_per_second": speed, **self.meter(record["step_seconds"])})
            self.bar.update()
            self.bar.set_postfix_str(f"loss {record['loss']:.3f}", refresh=False)
            if done % self.config.log_every == 0 or done == steps:
                tell(f"step {done}/{steps}  loss {record['loss']:.4f}  {speed:,.0f} {unit}/s")
            if "validation_loss" in record:
                tell(f"step {done}/{steps}  validation loss {record['validation_loss']:.4f}")

    def _save(self) -> None:
        self._write()
        config, self.saved = self.config, self.path / manifest.name_of(self.done)
        about = {
            "step": self.done,
            "examples": self.done * config.batch_size,
            "settings": config.settings(),
            "strategy": config.strategy,
            "implementation": config.implementation,
            "mesh": config.axes,
        }
        if self.main_rank:
            self.directory.sync_metrics()
        self.saver.save(self.saved, self.strategy, about)
        if self.main_rank:
            self.directory.keep_newest()

    def _resume(self) -> int:
        """Take up the checkpoint that the run goes on from; the number of steps that it has behind it."""
        # Rank 0 knows: after a restart the nodes need not agree on how many there were.
        there = self.directory
        box = [(there.path, there.restarted, there.checkpoints, there.insists) if self.main_rank else None]
        dist.broadcast_object_list(box, src=0)
        self.path, self.restarted, candidates, insists = box[0]
        for folder in candidates:
            found: list = [None] * self.size
            dist.all_gather_object(found, manifest.damage(folder, dist.get_rank(), self.size))
            wrong = next(filter(None, found), None)
            if wrong is None:
                return self._take_up(folder)
            if insists:
                raise UserError(f"--resume: {wrong}; --resume alone takes the newest checkpoint that is whole")
            if self.main_rank:
                tell(f"{wrong}; trying the checkpoint before it")
        if candidates:
            raise UserError(f"--resume: no checkpoint in {self.path} is whole; start a new run")
        return 0

    def _take_up(self, folder: Path) -> int:
        from common import checkpoint

        about, _ = manifest.read(folder)
        mine, its = self.config.settings(), about.get("settings", {})
        for item in [*shared(), *fields(self.config.options)]:
            if item.metadata["identity"] and item.name in its and its[item.name] != mine[item.name]:
                raise UserError(
                    f"--resume: {folder} was trained with {flag(item.name)} {its[item.name]}, and this run has "
                    f"{mine[item.name]}"
                )
        # A first step differs from the next: DDP, for one, arranges its buckets anew after it, and then adds in another
        # order. So this process does its first step now, and all that comes of it is overwritten.
        self.strategy.step(self.task.micro_batches(0, self.strategy))
        return checkpoint.load(folder, self.strategy)["step"]

    def _ask_to_stop(self, signum, frame) -> None:
        self.stop_asked = True

    def _somebody_asked_to_stop(self) -> bool:
        """Has any rank been asked to stop by the end of the step before? The same answer on every rank.

        The ranks' votes travel while they compute the next step, so that nobody waits for them.
        """
        if self.size == 1:
            return self.stop_asked
        asked = False
        if self.vote is not None:
            votes, work = self.vote
            work.wait()
            asked = bool(votes)
        votes = torch.tensor(int(self.stop_asked))
        self.vote = votes, dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        return asked

    def __exit__(self, kind, error, traceback) -> None:
        self.bar.close()
        self.loaders.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        # What gloo raises in a collective with a rank that is no more:
        lost = isinstance(error, RuntimeError) and re.search("Connection (closed|reset) by peer", str(error))
        if lost:
            raise UserError(
                f"another rank has died ({lost[0]}): see its message, or torchrun's report, for the cause; then "
                f"{self._how_to_go_on()}"
            ) from None
        # gloo again: of what waited in vain, and of what uses the same connection after that
        if isinstance(error, RuntimeError) and re.search("Timed out waiting|Application timeout", str(error)):
            raise UserError(f"{self._who_is_silent()}; then {self._how_to_go_on()}") from None
        if error is not None:
            return
        if self.vote is not None:
            self.vote[1].wait()
        self.saver.wait()
        if self.config.sample and self.done == self.config.steps:
            self._show_sample()
        if self.main_rank:
            self.directory.keep_newest()
            self.directory.finish()
            if self.done < self.config.steps:
                advice = f"go on with --resume --run-dir {self.path}"
                line = f"stopped after step {self.done} with {self.saved}; {advice}"
                tell(line)
                repeat_below_torchrun(line)
            else:
                tell(f"done: {self.path}")
        if self.done < self.config.steps:
            sys.exit(INTERRUPTED)

    def _show_sample(self) -> None:
        """What the model wrote before training and writes now. Collective."""
        state = self.strategy.full_state()
        if self.main_rank:
            model = self.task.make_model()
            for when in ("before", "after"):
                text = sample(model, self.config.context, self.config.sample)
                tell(f"--- what the model writes {when} training:\n{text}")
                model.load_state_dict(state["model"])

    def _who_is_silent(self) -> str:
        waited = f"within {self.config.timeout:g} s (--timeout)"
        gone = silent()
        if not gone:
            return f"ranks waited for each other, {waited}: their collectives differ; --check-collectives shows where"
        return f"{' and '.join(gone)} did not answer {waited}: see what happened there, and to the network"

    def _how_to_go_on(self) -> str:
        resume, again = f"go on with --resume --run-dir {self.path}", "start again"
        if not Path(self.path).exists():  # rank 0 makes it, and this may be another node
            return f"{resume} if there is a checkpoint, else {again}"
        return resume if manifest.checkpoints(self.path) else f"{again} (there is no checkpoint yet)"


def tell(text: str) -> None:
    """A line on stderr that leaves the progress bar whole."""
    tqdm.write(text, file=sys.stderr)
