"""Run a learner's functions on ranks and judge them: the engine under `common.check`.

The learner's file is loaded and called in the ranks of a `launch` only, never in the process that judges, so
whatever the file does at its top level (ends the process, prints, replaces functions) stays in those ranks.
What each rank returned, sent and received comes back as plain data and is compared, in the judging process,
with values that never touched the learner's code.
"""

import contextlib
import copy
import itertools
import os
import random
import re
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import is_
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier as store_barrier

from common.grading.reasons import (
    MORE_OR_FEWER,
    OF_OTHER_SIZE,
    WRITTEN,
    given,
    of_a_deadlock,
    of_a_receive_left_alone,
    of_a_root,
    of_an_error,
    relation,
    speaks_of_ranks,
)
from common.grading.values import Printed, difference, inputs, plain
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger, LedgerEntry

SIZES = (2, 3, 4)  # world sizes; the smallest counterexample is the easiest to read
PATIENCE = 5.0  # seconds that a send, receive or collective may wait for its partner
CALL_LIMIT = 2 * PATIENCE  # seconds for one call of a learner's function, or for loading the file
WALL = 6  # times that by the clock, where it isn't the clock that finds who waits in vain


@dataclass(frozen=True)
class Drawing:
    """What an answer does, drawn: lines of text for a terminal; for a notebook a function that makes the figure."""

    text: str
    figure: Callable
    alt: str


class Wrong(Exception):
    """What a pattern or a judge raises: what was expected, what came, on which rank (None: on all together), and a
    drawing of what came, if there is one; and why, where that is known."""

    def __init__(self, expected: str, got: str, rank: int | None = None, drawing: Drawing | None = None, why: str = ""):
        super().__init__(expected, got, rank)
        self.expected, self.got, self.rank, self.drawing, self.why = expected, got, rank, drawing, why


@dataclass(frozen=True)
class ExerciseCase:
    """One call of the exercise's function on every rank.

    what:      the input in words, for the message
    arguments: the arguments of each rank
    expected:  what each rank must return: a tensor (shape, type and values count), a number, text, or a list of
               these; or a judge, which is called with what the rank returned and raises Wrong
    pattern:   called with each rank's list of ledger entries; raises Wrong if the messages are not as asked
    """

    what: str
    arguments: list[tuple]
    expected: list
    pattern: Callable[[list[list[LedgerEntry]]], None]


@dataclass(frozen=True)
class Exercise:
    """A row of a chapter's table.

    check:      check(world size) gives the cases to try there: none where it has none
    draw:       for an exercise that calculates: draw(random) gives the arguments of a call that nobody has seen
    draw_cases: draw_cases(random, world size) gives whole cases that nobody has seen, where arguments do not say it
    mistakes:   for mistakes that are known: words of the verdict (" ... " is for any words between) -> why

    An exercise with neither has tensors among its arguments, whose numbers can be others (common/grading/fresh.py).
    """

    name: str
    points: int
    difficulty: str
    check: Callable[[int], Iterable[ExerciseCase]]
    hint: str
    draw: Callable[[random.Random], tuple] | None = None
    draw_cases: Callable[[random.Random, int], Iterable[ExerciseCase]] | None = None
    mistakes: Mapping[str, str] = field(default_factory=dict)


def exercise(
    check: Callable, points: int, dots: int, hint: str, mistakes: Mapping[str, str] | None = None, **drawn: Callable
) -> Exercise:
    """A row under its check's name, `dots` of five difficult; `drawn` is `draw` or `draw_cases` of the row."""
    return Exercise(
        check.__name__, points, "●" * dots + "○" * (5 - dots), check, hint, mistakes=mistakes or {}, **drawn
    )


@dataclass(frozen=True)
class Verdict:
    """`status` is "right", "wrong", "not attempted", or "not graded" when the file itself failed (see `got`)."""

    exercise: Exercise
    status: str
    where: str = ""
    expected: str = ""
    got: str = ""
    drawing: Drawing | None = None
    inputs: tuple[str, ...] = ()  # the call that went wrong, rank by rank
    printed: tuple[str, ...] = ()  # lines that it printed, headed by their rank
    why: str = ""  # where the kind of mistake is known
    # What went wrong, to be compared: world size, arguments of the calls up to it, outcomes of the last one.
    tried: "tuple[int, list[list[tuple]], list[CallOutcome]] | None" = field(default=None, compare=False, repr=False)

    @property
    def points(self) -> int:
        return self.exercise.points if self.status == "right" else 0

    @property
    def text(self) -> str:
        """What is wrong, in one line."""
        return f"{self.where}: expected {self.expected}, got {self.got}"

    def with_known_mistake(self) -> "Verdict":
        """This verdict with the reason that the exercise's table of mistakes knows for its words, if it does."""
        known = [why for words, why in self.exercise.mistakes.items() if matches(words, self.text)]
        return replace(self, why=known[0]) if known else self


def matches(words: str, text: str) -> bool:
    """Whether a text contains these words, where " ... " stands for any words between."""
    return bool(re.search(".*".join(map(re.escape, words.split(" ... "))), text))


@dataclass
class CallOutcome:
    """How one call ended on one rank: "returned", "raised", "waited" for a partner in vain, "not attempted"."""

    status: str
    value: object = None
    entries: list[LedgerEntry] = field(default_factory=list)
    changed_input: bool = False
    text: str = ""
    printed: str = ""


class DoesNotLoad(Exception):
    """The learner's file cannot be executed; the text says why."""


def load(file: Path) -> types.ModuleType:
    """Execute a Python file as a module of its own, from its present text: an edit is seen at once."""
    module = types.ModuleType(f"{file.parent.name}.{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


def grade(
    attempts: list[tuple[Exercise, str]],
    file: Path,
    run: Callable | None = None,
    progress: Callable = lambda _text: None,
) -> list[Verdict]:
    """Judge the functions of `file` named in `attempts`, each as an answer to its exercise.

    run(file, jobs, size): how they are run, by default on ranks of this machine (run_jobs)
    progress:              called with what is being done, in words
    """
    run = run or run_jobs
    verdicts: dict[int, Verdict] = {}
    printed: dict[int, tuple[str, ...]] = {}
    try:
        for size in SIZES:
            left = len(attempts) - len(verdicts)
            if not left:
                break
            progress(f"starting {size} ranks for {left} exercise{'s' * (left > 1)}")
            cases = {n: list(exercise.check(size)) for n, (exercise, _) in enumerate(attempts) if n not in verdicts}
            jobs = {n: (attempts[n][1], [case.arguments for case in of]) for n, of in cases.items() if of}
            for n, outcome in run(file, jobs, size).items():
                try:
                    verdict = _judge(attempts[n][0], size, cases[n], outcome, attempts[n][1])
                except Exception as error:  # a learner's function can return anything
                    got = f"one that cannot be ({type(error).__name__})"
                    verdict = Verdict(attempts[n][0], "wrong", f"world size {size}", "a result to compare", got)
                if speaks_of_ranks(verdict.why, 2) and not _so_with_three(attempts[n], file, run):
                    verdict = replace(verdict, why="")
                printed[n] = verdict.printed
                if verdict.status != "right":
                    verdicts[n] = verdict
    except DoesNotLoad as reason:
        return [Verdict(exercise, "not graded", got=str(reason)) for exercise, _ in attempts]
    rights = [Verdict(exercise, "right", printed=printed.get(n, ())) for n, (exercise, _) in enumerate(attempts)]
    return [verdicts.get(n, right) for n, right in enumerate(rights)]


def _so_with_three(attempt: tuple[Exercise, str], file: Path, run: Callable) -> bool:
    """Whether what two ranks suggest, a factor that is their number, is so with three."""
    exercise, name = attempt
    cases = list(exercise.check(3))
    (outcome,) = run(file, {0: (name, [case.arguments for case in cases])}, 3).values()
    try:
        return speaks_of_ranks(_judge(exercise, 3, cases, outcome, name).why, 3)
    except Exception:  # as above: anything can come back
        return False


def run_jobs(file: Path, jobs: dict, size: int) -> dict:
    """For each job, a list of outcomes for each rank, or the text of a RankFailed.

    All jobs share one launch, which is what takes the time; if a process dies in it, each gets its own.
    """
    if not jobs:
        return {}
    try:
        ranks = _launch(file, jobs, size)
    except RankFailed as failed:
        if len(jobs) == 1:
            ((key, (name, cases)),) = jobs.items()
            return {key: _until_it_dies(file, name, cases, size) or _death(failed)}
        try:
            _launch(file, {}, size)
        except RankFailed as failed_again:
            raise DoesNotLoad(f"loading the file ends the process: {_death(failed_again)}") from None
        return {key: run_jobs(file, {key: job}, size)[key] for key, job in jobs.items()}
    return {key: [rank[key] for rank in ranks] for key in jobs}


def _until_it_dies(file: Path, name: str, cases: list, size: int) -> list[list[CallOutcome]]:
    """The outcomes of a function's calls one by one, each in processes of its own, up to the one that ends a process;
    empty where none does by itself."""
    ranks: list[list[CallOutcome]] = [[] for _ in range(size)]
    for arguments in cases:
        try:
            outcomes = [rank[0] for rank in _launch(file, {0: (name, [arguments])}, size)]
        except RankFailed as failed:
            outcomes = [[CallOutcome("raised", text=_death(failed))]] * size
        for rank, outcome in zip(ranks, outcomes, strict=True):
            rank += outcome
        if any(outcome[0].status != "returned" for outcome in outcomes):
            return ranks
    return []


def _launch(file: Path, jobs: dict, size: int, *more) -> list[dict]:
    ranks = launch(_on_rank, size, (file, jobs, *more), timeout=30 + CALL_LIMIT * (1 + len(jobs)))
    problems = [rank for rank in ranks if isinstance(rank, str)]
    if problems:
        raise DoesNotLoad(next(filter(None, problems)))
    return ranks


def _death(failed: RankFailed) -> str:
    """Which rank's process ended, and how, from the report of a launch."""
    dead = [rank for rank, state in enumerate(failed.where) if state.startswith("died")]
    if not dead:
        return f"the process of rank {failed.rank} failed: {str(failed).splitlines()[0].partition(': ')[2]}"
    rank = failed.rank if failed.rank in dead else dead[0]
    state = failed.where[rank]
    if state == "died with exit code 0 before it returned":
        state = "ended without returning (did it call exit?)"
    if "SIGABRT" in state:
        state += ": gloo aborts a process that is sent more bytes than its buffer holds; are shape and type right?"
    return f"the process of rank {rank} {state}"


# --- in the ranks ---------------------------------------------------------------------------------------------


class CheckedRank:
    """What one rank does with a learner's file: loads it, and calls its functions."""

    def __init__(self, file: Path):
        self.file, self.seal, self.intact = file, _Seal(), True
        self.module: types.ModuleType | None = None

    def load(self) -> str | None:
        """Execute the file; why it does not load, None where it does."""
        # After everything else: a file named random.py beside the learner's must not hide the standard library's.
        sys.path.append(str(self.file.parent))
        try:
            with _alarm():
                self.module = load(self.file)
        except BaseException as error:
            return _describe(error, self.file)
        return TAMPERED if self.seal.broken() else None

    def call(self, name: str, arguments: tuple, network=None) -> CallOutcome:
        """network: within it messages take another way than the process group's."""
        with network or contextlib.nullcontext():
            seconds = CALL_LIMIT * (WALL if network else 1)
            outcome = _call(getattr(self.module, name, None), arguments, self.file, seconds)
        if self.intact and not self.seal.broken():
            return outcome
        self.intact = False
        return CallOutcome("raised", text=TAMPERED)


def _on_rank(file: Path, jobs: dict, own_groups: bool = True, done: Callable = lambda _rank, _job, _outcomes: None):
    """Call each job's function on its cases. Returns {job: outcomes}, or the reason why the file does not load.

    own_groups: each job has a process group of its own, so that no message of one is received by the next; else only
    those behind one that went wrong, or that sent messages to single ranks
    done: called with the rank, a job and its outcomes as soon as all ranks have theirs
    """
    rank, size, meetings, me = dist.get_rank(), dist.get_world_size(), itertools.count(), CheckedRank(file)
    store = dist.distributed_c10d._get_default_store()

    def all_well(well: bool) -> bool:
        """Wait for all ranks, through the store since the group may be stuck, and hear whether all are well."""
        key = f"check/{next(meetings)}"
        store.add(f"{key}/unwell", int(not well))
        store_barrier(store, size, key, barrier_timeout=PATIENCE + CALL_LIMIT)
        return store.add(f"{key}/unwell", 0) == 0

    problem = me.load()
    if not all_well(problem is None):
        return problem or ""  # empty where another rank has the problem
    outcomes: dict[int, list[CallOutcome]] = {}
    clean = False
    for key, (name, cases) in jobs.items():
        if own_groups or not clean:
            dist.destroy_process_group()
            own, wait = dist.PrefixStore(f"job {key}", store), timedelta(seconds=PATIENCE)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=wait)
        outcomes[key], clean = [], True
        for arguments in cases:
            outcome = me.call(name, arguments[rank])
            outcomes[key].append(outcome)
            clean = clean and all(entry.peer is None for entry in outcome.entries)
            if not all_well(outcome.status == "returned"):
                clean = False
                break
        clean = own_groups or all_well(clean)
        done(rank, key, outcomes[key])
    return outcomes


def _call(function, arguments: tuple, file: Path, seconds: float = 0.0) -> CallOutcome:
    if function is None:
        return CallOutcome("not attempted")
    before = copy.deepcopy(arguments)
    ledger, printed = Ledger(), Printed()
    try:
        with ledger, _alarm(seconds), contextlib.redirect_stdout(printed):
            value = function(*arguments)
    except BaseException as error:
        if type(error) is NotImplementedError and not str(error):  # torch's own come with a text
            return CallOutcome("not attempted", text=_describe(error, file))
        # A timeout, or what the partner of a rank that timed out sees.
        waited = re.search("Timed out|timeout|Connection (closed|reset) by peer", str(error))
        text = _describe(error, file, bool(waited))
        return CallOutcome(
            "waited" if waited else "raised", None, ledger.entries, text=text, printed=printed.getvalue()
        )
    changed = any(difference(old, new) for old, new in zip(before, arguments, strict=True))
    changed = changed or any(map(wants_gradient, arguments)) != any(map(wants_gradient, before))
    return CallOutcome("returned", plain(value), ledger.entries, changed, printed=printed.getvalue())


def wants_gradient(value) -> bool:
    """Whether some tensor in an argument requires a gradient, which a function may switch on in place."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(map(wants_gradient, value))


TAMPERED = "the file replaces functions of PyTorch or of the checker, so nothing that is counted can be believed"


class _Seal:
    """What the counting and judging of messages rests on: which objects these names stand for when it is made."""

    def __init__(self):
        owners: list[types.ModuleType | type] = [
            sys.modules[__name__],
            sys.modules[Ledger.__module__],
            sys.modules[plain.__module__],
        ]
        owners += [Ledger, LedgerEntry, dist, dist.distributed_c10d, torch, torch.Tensor, copy, contextlib]
        self.before = [(owner, dict(vars(owner))) for owner in owners]

    def broken(self) -> bool:
        """Whether one of these names stands for another object now. Asked after every call, of some 2,000 names."""
        return any(
            (len(vars(owner)) != len(before) or not all(map(is_, vars(owner).values(), before.values())))
            and counted(vars(owner)) != counted(before)
            for owner, before in self.before
        )


def counted(names: Mapping) -> dict[str, int]:
    """Those of a module's or a class's names that count: what can be called."""
    return {
        name: id(value)
        for name, value in names.items()
        if callable(value) and not name.startswith("__") or name.startswith("__torch") or name == "__code__"
    }


class _OutOfTime(BaseException):
    """Not an Exception, so that a learner's `except Exception` in a loop does not swallow it."""


@contextlib.contextmanager
def _alarm(seconds: float = 0.0):
    """End what runs inside after CALL_LIMIT seconds of processor time, or so many of the clock's (0: as many), without
    those in which this process waited for a core. Where there is no SIGALRM (Windows) the launch's own timeout has to
    do."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    by_the_clock = seconds or CALL_LIMIT
    begin, late = time.monotonic(), waited_for_a_core(os.getpid())

    def ring(signum, _frame):
        waited = waited_for_a_core(os.getpid()) - late
        if signum == signal.SIGALRM and time.monotonic() - begin - waited < by_the_clock:
            return  # and rings again in a second
        raise _OutOfTime

    for kind, timer, limit in (
        (signal.SIGALRM, signal.ITIMER_REAL, by_the_clock),
        (signal.SIGPROF, signal.ITIMER_PROF, CALL_LIMIT),
    ):
        signal.signal(kind, ring)
        signal.setitimer(timer, limit, 1)  # and every second from then on, for a bare `except:`
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def waited_for_a_core(pid: int) -> float:
    """Seconds that the threads of a process were ready to compute and others had the core, added up; 0 where the system
    doesn't say."""
    found = 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found += int(thread.read_text().split()[1]) / 1e9
    return found


def _describe(error: BaseException, file: Path, waited: bool = False) -> str:
    """An error in one line: what, and the line of the learner's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file)]
    if waited:
        operations = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
        named = re.search(r"for (\w+) operation", str(error))
        text = f"waiting in {operations[0]}" if operations else f"waiting for a {named[1] if named else 'message'}"
    elif isinstance(error, _OutOfTime):
        text = f"no end after {CALL_LIMIT:g} s"
    else:
        message = re.sub(r"\[[^\]]*\.cc:\d+\] ", "", str(error))  # where in gloo's C++ it was written
        text = f"{type(error).__name__}: {message}".splitlines()[0].removesuffix(": ")
    return text + (f", line {own[-1].lineno} of {own[-1].name}: {own[-1].line}" if own else "")


# --- in the process that judges -------------------------------------------------------------------------------


def _judge(
    exercise: Exercise, size: int, cases: list[ExerciseCase], ranks: list[list[CallOutcome]] | str, name: str
) -> Verdict:
    if isinstance(ranks, str):
        why = of_an_error(ranks)
        verdict = Verdict(exercise, "wrong", f"world size {size}", "a result on every rank", ranks, why=why)
        return verdict.with_known_mistake()
    printed: tuple[str, ...] = ()
    for number, case in enumerate(cases):  # after a failed case there are no more outcomes
        outcomes = [rank[number] for rank in ranks if number < len(rank)]
        if len(ranks) != size or len(outcomes) != size:
            return Verdict(exercise, "wrong", f"world size {size}, {case.what}", "a result on every rank", "nothing")
        if all(outcome.status == "not attempted" for outcome in outcomes):
            return Verdict(exercise, "not attempted")
        lines = [(rank, line) for rank, outcome in enumerate(outcomes) for line in outcome.printed.splitlines()]
        printed = tuple(f"rank {rank}: {line}" for rank, line in lines)
        try:
            _judge_case(case, outcomes)
        except Wrong as wrong:
            where = f"world size {size}, {case.what}" + ("" if wrong.rank is None else f", rank {wrong.rank}")
            called = tuple(inputs(case.arguments, name))
            tried = size, [case.arguments for case in cases[: number + 1]], outcomes
            details = wrong.expected, wrong.got, wrong.drawing, called, printed, wrong.why, tried
            return Verdict(exercise, "wrong", where, *details).with_known_mistake()
    return Verdict(exercise, "right", printed=printed)


def _judge_case(case: ExerciseCase, outcomes: list[CallOutcome]) -> None:
    """Raise Wrong for the first thing that is not as it should be; causes come before their consequences."""
    for rank, outcome in enumerate(outcomes):
        if outcome.status in ("raised", "not attempted"):
            raise Wrong("a result on every rank", outcome.text, rank, why=of_an_error(outcome.text))
    if any(outcome.status == "waited" for outcome in outcomes):
        stories: dict[str, list[str]] = {}
        for rank, outcome in enumerate(outcomes):
            stories.setdefault(outcome.text or "had returned", []).append(f"rank {rank}")
        ends = "; ".join(f"{' and '.join(who)} {story}" for story, who in stories.items())
        waits = f"a deadlock, no answer for {PATIENCE:g} s: {ends}"
        raise Wrong("a result on every rank", waits, why=_left_alone(outcomes) or of_a_deadlock(list(stories)))
    entries = [outcome.entries for outcome in outcomes]
    _every_message_received(entries)
    for rank, (expected, outcome) in enumerate(zip(case.expected, outcomes, strict=True)):
        if callable(expected):
            expected(outcome.value)
            continue
        differs = difference(expected, outcome.value)
        if differs:
            ranks = len(outcomes) if any(entries) else 0  # where nothing is sent, their number says nothing
            why = of_a_root([(entry.operation, entry.peer) for entry in outcome.entries], rank)
            why = why or given(expected, outcome.value, case.arguments, rank)
            why = why or relation(expected, outcome.value, ranks)
            raise Wrong(*differs, rank, why=why)
    for rank, outcome in enumerate(outcomes):
        if outcome.changed_input:
            raise Wrong("the arguments left as they were", "the function wrote into its arguments", rank, why=WRITTEN)
    case.pattern(entries)


def _left_alone(outcomes: list[CallOutcome]) -> str:
    """Why, where a rank waits for its message to be taken by one that has started to and has returned."""
    for sender, waiting in enumerate(outcomes):
        for receiver, other in enumerate(outcomes):
            sent = [e.payload for e in waiting.entries if e.operation == "send" and e.peer == receiver]
            taken = [e.payload for e in other.entries if e.operation == "recv" and e.peer == sender]
            if (waiting.status, other.status) == ("waited", "returned") and sent and sent == taken:
                return of_a_receive_left_alone(receiver, sender)
    return ""


def _every_message_received(entries: list[list[LedgerEntry]]) -> None:
    for rank, own in enumerate(entries):
        sent = sorted(e.payload for one in entries for e in one if e.operation == "send" and e.peer == rank)
        received = sorted(e.payload for e in own if e.operation == "recv")
        if sent != received:
            why = OF_OTHER_SIZE if len(sent) == len(received) else MORE_OR_FEWER
            raise Wrong(
                f"receives for the messages sent to this rank, of {sent} bytes",
                f"receives of {received} bytes",
                rank,
                why=why,
            )
