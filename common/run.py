"""A run as the training loop sees it: which steps to do, their batches and learning rates, and what is kept of them.

The loop itself is in each chapter's script:

    with Run(config, strategy, task) as run:
        batches = run.batches()
        for step in run.steps:
            strategy.set_learning_rate(run.learning_rate(step))
            loss, grad_norm = strategy.step(next(batches))
            if run.end_step(loss, grad_norm):
                break
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from common import data, stored
from common.compiled import compile_blocks
from common.config import Config
from common.errors import INTERRUPTED, LostPeer, into_report, lost_peer
from common.keeper import Keeper
from common.learning_rate import learning_rate
from common.profiled import profiler
from common.progress import Progress
from common.ranks import show_ranks, silent
from common.record import Record, print_line
from common.sample import sample
from common.strategy import Strategy, require_precision, use_tf32
from common.task import Task, check_batch
from common.terminal_plot import drawn


class Run:
    """One training run; made and entered on every rank.

    keeper:   its folder and its checkpoints; it takes one up where the run goes on
    progress: how far it is, and whether it has been asked to stop
    record:   metrics, and what is printed

    Leaving it normally closes the run directory; after Ctrl-C or SIGTERM it exits with code INTERRUPTED. Raises
    UserError for a batch that cannot be divided, a precision that the device does not have, a resumed run that has all
    its steps behind it, a run directory that cannot be written, a loss that is no number, and when another rank has
    died.
    """

    def __init__(self, config: Config, strategy: Strategy, task: Task):
        check_batch(config, strategy.data_size)
        require_precision(strategy.device, config.precision)
        if config.compile:
            compile_blocks(strategy.model, config.compile)
        if config.tf32:
            use_tf32(strategy.device)
        if config.debug_server and config.distributed:
            show_ranks(config.debug_server)
        self.config, self.strategy, self.task = config, strategy, task
        self.keeper = Keeper(config, strategy, task)
        self.main_rank = self.keeper.directory.writes
        if self.main_rank:
            for line in first_lines(config, self.keeper, strategy.device):
                print_line(line)
        self.record = Record(config, strategy, task, self.keeper.directory, self.keeper.done)
        self.loaders = contextlib.ExitStack()
        self.profiler = profiler(config.profile, self.keeper.path / "profile", dist.get_rank())
        self.progress = Progress(self.keeper.done, config.steps)

    def __enter__(self) -> "Run":
        self.progress.listen()
        self.loaders.enter_context(self.profiler)
        self.record.begin_step()
        return self

    @property
    def steps(self) -> range:
        """The steps that are still to be done, counted from 0."""
        return range(self.progress.done, self.config.steps)

    def batches(self, load=data.shard) -> Iterator[list]:
        """This rank's micro-batches from the next step on. `load(dataset, plan, start)` is how they are read; the time
        that a step waits for them counts in its step_seconds."""
        batches = load(self.task.dataset, self.task.plan(self.strategy), self.progress.done)
        return self.loaders.enter_context(contextlib.closing(batches))

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        return learning_rate(self.config, step)

    def end_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        """Keep what a step gave, and write a checkpoint where one is due. True where any rank has been asked to stop.
        Collective: the answer is the same on all ranks."""
        progress, record, every = self.progress, self.record, self.config.checkpoint_every
        record.log(progress.done, loss, grad_norm, self.learning_rate(progress.done))
        progress.done += 1
        if self.config.profile:
            self.profiler.step()
        stopping = progress.stops()
        if stopping or progress.complete or (every and progress.done % every == 0):
            record.write()
            self.keeper.save(progress.done)
            record.begin_step()
        return stopping

    def __exit__(self, kind, error, traceback) -> None:
        self.record.close()
        self.loaders.close()
        explained = explanation(error, self.config.timeout)
        if explained and "TORCHELASTIC_ERROR_FILE" in os.environ and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            # torchrun has seen as well that a rank has died, and ends the others: this one first has something to say
            self.progress.handlers[signal.SIGTERM] = signal.SIG_IGN
        self.progress.close()
        if explained:
            raise LostPeer(f"{explained}; then {self.keeper.how_to_resume()}") from None
        if error is None:
            self._end()

    def _end(self) -> None:
        """What comes after the last step. Collective."""
        self.progress.last_vote()
        done, path = self.progress.done, self.keeper.path
        if self.config.sample and self.progress.complete:
            self._print_samples()
        self.keeper.close()
        if self.progress.complete:
            if self.main_rank and self.config.sample:
                self._print_what_next()
            if self.main_rank:
                print_line(f"done: {path}")
            return
        if self.main_rank:
            line = f"stopped after step {done} with {self.keeper.saved}; go on with --resume --run-dir {path}"
            print_line(line)
            into_report(line)
        sys.exit(INTERRUPTED)

    def _print_what_next(self) -> None:
        """For whoever watches: the loss as a curve of letters, where its picture is, and what to try."""
        path = self.keeper.path
        losses = [record["loss"] for record in stored.records_of(path)]
        print_line(f"--- loss of {len(losses)} steps, its picture in {path / 'loss.png'}:\n{drawn(losses)}")
        print_line(
            f"--- three things to try next:\n"
            f"python -m common.generate {path} --prompt 'import '   # what it writes after words of yours\n"
            f"torchrun --nproc_per_node=2 distributed_training.py --distributed --strategy fsdp   # the same, sharded\n"
            f"make lab   # how it works, from the first page on"
        )

    def _prompt(self) -> str:
        """How what the model writes begins: as a function of Python's, or as the text that somebody has given."""
        dataset = self.task.dataset
        if not self.config.text or not isinstance(dataset, data.Text):
            return "def "
        return bytes(dataset.tokens[:4].tolist()).decode(errors="replace")

    def _print_samples(self) -> None:
        """What the model wrote before training and writes now. Collective."""
        state = self.strategy.full_state()
        if self.main_rank:
            model = self.task.make_model()
            for when in ("before", "after"):
                text = sample(model, self.config.context, self.config.sample, self._prompt())
                print_line(f"--- what the model writes {when} training:\n{text}")
                model.load_state_dict(state["model"])


def first_lines(config: Config, keeper: Keeper, device: torch.device) -> list[str]:
    """What rank 0 prints when a run begins or goes on."""
    size = dist.get_world_size()
    lines = [f"{config.strategy} on {size} process(es), {device.type}: {keeper.path}"]
    if keeper.directory.restarted:
        lines.append(f"restarted by torchrun: going on after step {keeper.done}")
    elif keeper.done:
        lines.append(f"going on after step {keeper.done}")
    if size > 1 and config.entry and config.entry.sizes(config.implementation) == (1,):
        alike = f"all {size} ranks train the same model on the same data"
        lines.append(f"note: strategy '{config.strategy}' divides nothing between processes: {alike}")
    return lines


def explanation(error: BaseException | None, timeout: float) -> str:
    """What has happened where gloo says that another rank does not take part; "" for other errors. `timeout` is that of
    collectives, in seconds."""
    if not isinstance(error, RuntimeError):
        return ""
    lost = lost_peer(error)
    if lost:
        return lost
    # what waited in vain, and what uses the same connection after that
    if not re.search("Timed out waiting|Application timeout", str(error)):
        return ""
    waited, gone = f"within {timeout:g} s (--timeout)", silent()
    if not gone:
        return f"ranks waited for each other, {waited}: their collectives differ; --check-collectives shows where"
    return f"{' and '.join(gone)} did not answer {waited}: see what happened there, and to the network"
