"""How a script starts: read the command line, then call the main function of the strategy's chapter."""

import sys
from collections.abc import Callable

from common import installed
from common.errors import one_line_errors
from common.launcher import environment
from course import name_what_was_started


def read_command(strategy: str | None = None, implementation: str = "pytorch") -> Callable[[], None]:
    """Read the command line, and return the function that trains as it says. `strategy` is a chapter's default: then
    only its chapter's strategies are taken. `implementation` is a script's default.

    A script calls this before it imports anything else: most errors of use are found without PyTorch, whose import
    takes seconds. They become one line, and so do those that are found later.
    """
    installed.at_start()
    from common.command_line import read
    from course.strategies import BY_AXES, STRATEGIES

    home = STRATEGIES[strategy].chapter if strategy else None
    with one_line_errors():
        finish = read(STRATEGIES, strategy, None, BY_AXES, implementation, pick, home)
    if sys.stderr.isatty() and environment()[0] == 0:
        print("starting PyTorch ...", file=sys.stderr, flush=True)  # its import takes seconds, on a busy machine many

    def start() -> None:
        name_what_was_started()
        with one_line_errors():
            train(finish())

    return start


def train(config) -> None:
    """Train as a run's settings say."""
    from common.run_dir import claim

    if config.trains:
        claim(config)
    if config.dry_run:
        from course.dry_run import dry_run  # it pretends that there are devices: nothing that trains needs it

        dry_run(config)
    else:
        config.main(config)


def pick(argv: list[str]) -> list[str]:
    """The command line with what the planner picks for --strategy auto."""
    from course.auto import choose  # it imports the planner, which no other training needs

    return choose(argv)
