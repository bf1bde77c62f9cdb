"""The checkpoints of a run: the one that it goes on from, and those that it leaves."""

from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from common import manifest
from common.config import Config, shared
from common.errors import UserError
from common.options import flag
from common.record import print_line
from common.run_dir import open_run
from common.strategy import Strategy
from common.task import Task

if TYPE_CHECKING:
    from common.checkpoint import Saver


class Keeper:
    """The folder of a run and the checkpoints in it.

    Making it is collective, and takes up the checkpoint that the run goes on from, if it does; `done` is the number of
    steps that this has behind it. Raises UserError for a checkpoint of other settings, where none is whole, and for a
    run that has all its steps behind it.
    """

    def __init__(self, config: Config, strategy: Strategy, task: Task):
        self.config, self.strategy = config, strategy
        self.directory = open_run(config)
        self.path = self.directory.path
        self.done = self._resume(task)
        if config.resume and not self.directory.restarted and self.done >= config.steps:
            done = f"--resume: {self.path} has its {self.done} steps behind it, so there is nothing to do"
            raise UserError(f"{done}; ask for more with --steps {2 * self.done}")
        if self.directory.resumes:
            self.directory.drop_after(self.done)
        if config.tensorboard:
            self.directory.write_board(self.done)
        self.saved = self.path / manifest.name_of(self.done)  # the newest

    @cached_property
    def saver(self) -> "Saver":
        """What writes. Collective when it is first asked for, with the first checkpoint: importing it takes half a
        second, which the first step need not wait for."""
        from common.checkpoint import Saver

        return Saver(self.config.async_checkpoint)

    def save(self, done: int) -> None:
        """Write the checkpoint after `done` steps, and remove what is older than --keep. Collective."""
        config, self.saved = self.config, self.path / manifest.name_of(done)
        about = {
            "step": done,
            "examples": done * config.batch_size,
            "settings": config.settings(),
            "strategy": config.strategy,
            "implementation": config.implementation,
            "mesh": config.axes,
        }
        self.directory.sync_metrics()
        self.saver.save(self.saved, self.strategy, about)
        self.directory.keep_newest()

    def close(self) -> None:
        """Until what is being written is in its place, and the run directory is as it stays. Collective."""
        if "saver" in vars(self):
            self.saver.wait()
        self.directory.keep_newest()
        self.directory.finish()

    def how_to_resume(self) -> str:
        """What to do after this run has ended before its time."""
        resume, again = f"go on with --resume --run-dir {self.path}", "start again"
        if not self.path.exists():  # rank 0 makes it, and this may be another node
            return f"{resume} if there is a checkpoint, else {again}"
        return resume if manifest.checkpoints(self.path) else f"{again} (there is no checkpoint yet)"

    def _resume(self, task: Task) -> int:
        """Take up the best checkpoint that is whole; the number of steps that it has behind it."""
        candidates = self.directory.checkpoints
        for folder in candidates:
            found: list = [None] * dist.get_world_size()
            dist.all_gather_object(found, manifest.damage(folder, dist.get_rank(), len(found)))
            wrong = next(filter(None, found), None)
            if wrong is None:
                return self._take_up(folder, task)
            if self.directory.is_named:
                raise UserError(f"--resume: {wrong}; --resume alone takes the newest checkpoint that is whole")
            if self.directory.writes:
                print_line(f"{wrong}; trying the checkpoint before it")
        if candidates:
            raise UserError(f"--resume: no checkpoint in {self.path} is whole; start a new run")
        return 0

    def _take_up(self, folder: Path, task: Task) -> int:
        from common import checkpoint

        about = manifest.read(folder).about
        mine, its = self.config.settings(), about.get("settings", {})
        for item in [*shared(), *fields(self.config.options)]:
            if item.metadata["identity"] and item.name in its and its[item.name] != mine[item.name]:
                raise UserError(
                    f"--resume: {folder} was trained with {flag(item.name)} {its[item.name]}, and this run has "
                    f"{mine[item.name]}"
                )
        self.strategy.before_loading(lambda: task.micro_batches(0, self.strategy))
        return checkpoint.load(folder, self.strategy)["step"]
