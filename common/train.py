"""The loop that trains any strategy, and how a script starts it."""

import contextlib
import math
import re
import signal
import sys
import time

import torch
from course.strategies import find
from tqdm import tqdm

from common import data
from common.config import Config, parse
from common.errors import UserError, one_line_errors
from common.ranks import Ranks
from common.run_dir import RunDirectory
from common.strategy import Strategy, require_precision
from common.task import Task, check_batch

WARM_UP = 20  # steps
INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it


def start(main, strategy: str) -> None:
    """Read the command line and call main(config); `strategy` is the default. Errors of use become one line."""
    with one_line_errors():
        config = parse(strategy)
        if find(config.strategy, config.by_hand).chapter != find(strategy).chapter:
            raise UserError(
                f"--strategy {config.strategy} lives in {find(config.strategy, config.by_hand).chapter}/: "
                f"start it there, or from the repository's root"
            )
        main(config)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then constant: a function of the step alone, so that a resumed run may be made longer."""
    return config.lr * min(1.0, (step + 1) / WARM_UP)


def train(strategy: Strategy, task: Task, config: Config, ranks: Ranks, load=data.shard) -> None:
    """Train for config.steps steps, or until Ctrl-C or SIGTERM; leave a run directory with a checkpoint.

    `load(dataset, plan, start)` gives a generator of this rank's micro-batches from step `start` on; the time that
    a step waits for them counts in its step_seconds.

    Exits with code INTERRUPTED after one of those. Raises UserError for a batch that cannot be divided, a
    precision that the device does not have, a run directory that cannot be written, a loss that is no number, and
    when another rank has died.
    """
    check_batch(config, strategy)
    require_precision(ranks.device, config.precision)
    main_rank = ranks.rank == 0
    run = RunDirectory(config, ranks.size) if main_rank else None
    # Rank 0 knows: after a restart the nodes need not agree on how many there were.
    done = resume(strategy, run, ranks) if ranks.any(main_rank and run.goes_on) else 0
    per_step = config.batch_size * (config.context if config.task == "text" else 1)
    rate_name = f"{task.dataset.unit}_per_second"
    if main_rank:
        tell(f"{config.strategy} on {ranks.size} process(es), {ranks.device.type}: {run.path}")
        if done and not config.resume:
            tell(f"restarted by torchrun: going on after step {done}")
        if ranks.size > 1 and find(config.strategy, config.by_hand).sizes(config.by_hand) == (1,):
            alike = f"all {ranks.size} ranks train the same model on the same data"
            tell(f"note: strategy '{config.strategy}' divides nothing between processes: {alike}")
    often = 0.1 if sys.stderr.isatty() else 10.0  # in a log file each refresh is a line of its own
    bar = tqdm(total=config.steps, initial=done, unit="step", disable=not main_rank, mininterval=often)
    batches = contextlib.closing(load(task.dataset, task.plan(strategy), done))
    with stop_requested() as stop, bar, lost_ranks_are_named(run), batches as batches:
        while done < config.steps:
            begin = time.perf_counter()
            strategy.set_learning_rate(learning_rate(config, done))
            loss, grad_norm = strategy.step(next(batches))
            loss, grad_norm = loss.item(), grad_norm.item()  # waits for the device: from here on the step is over
            seconds = time.perf_counter() - begin
            done += 1
            if not math.isfinite(loss):
                raise UserError(f"the loss is {loss} at step {done}; try a smaller --lr than {config.lr}")
            if main_rank:
                run.log(
                    {
                        "step": done,
                        "loss": loss,
                        # fp16's loss scaling overflows now and then, and skips that step: JSON has no infinity
                        "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
                        "learning_rate": learning_rate(config, done - 1),
                        rate_name: per_step / seconds,
                        "step_seconds": seconds,
                    }
                )
                bar.update()
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                if done % config.log_every == 0 or done == config.steps:
                    tell(
                        f"step {done}/{config.steps}  loss {loss:.4f}  {per_step / seconds:,.0f} {task.dataset.unit}/s"
                    )
            stopping = ranks.any(stop.is_set)
            if stopping or done == config.steps or (config.checkpoint_every and done % config.checkpoint_every == 0):
                state = strategy.full_state()
                if main_rank:
                    checkpoint = run.save({"step": done, **state})
            if stopping:
                break
    if main_rank:
        run.finish()
        if done < config.steps:
            tell(f"stopped after step {done} with {checkpoint}; go on with --resume --run-dir {run.path}")
        else:
            tell(f"done: {run.path}")
    if done < config.steps:
        sys.exit(INTERRUPTED)


def resume(strategy: Strategy, run: RunDirectory | None, ranks: Ranks) -> int:
    """Take up the newest checkpoint on every rank, read on rank 0 alone; the number of steps it has behind it."""
    state = run.load() if run else {}
    strategy.load_full_state(state)
    done = torch.tensor(state.get("step", 0))
    torch.distributed.broadcast(done, src=0)
    if run:
        run.forget_after(int(done))
    return int(done)


@contextlib.contextmanager
def lost_ranks_are_named(run: RunDirectory | None):
    """What gloo raises in a collective with a rank that is no more becomes a UserError, which says how to go on."""
    try:
        yield
    except RuntimeError as error:
        lost = re.search("Connection (closed|reset) by peer", str(error))
        if not lost:
            raise
        advice = f"go on with --resume --run-dir {run.path}" if run else "go on with --resume"
        raise UserError(
            f"another rank has died ({lost[0]}): see its message, or torchrun's report, for the cause; then {advice}"
        ) from None


class Stop:
    is_set = False


@contextlib.contextmanager
def stop_requested():
    """Ctrl-C and SIGTERM (what torchrun and SLURM send) ask the loop to end after the step it is in."""
    stop = Stop()

    def ask(signum, frame):
        stop.is_set = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell(text: str) -> None:
    """A line on stderr that leaves the progress bar whole."""
    tqdm.write(text, file=sys.stderr)
