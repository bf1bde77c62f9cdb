"""How a script starts: read the command line, then call the main function of the strategy's chapter."""

from common import installed
from common.errors import UserError, one_line_errors
from course import name_what_was_started


def start(strategy: str | None = None, implementation: str = "pytorch") -> None:
    """Train as the command line says. `strategy` is a chapter's default: then only its chapter's strategies are taken.
    `implementation` is a script's default.

    Errors of use become one line.
    """
    installed.at_start()
    from common.command_line import parse
    from common.run_dir import claim
    from course.strategies import BY_AXES, STRATEGIES

    name_what_was_started()
    with one_line_errors():
        config = parse(STRATEGIES, strategy, by_axes=BY_AXES, default_implementation=implementation, auto=pick)
        home = STRATEGIES[strategy].chapter if strategy else config.entry.chapter
        if config.entry.chapter != home:
            raise UserError(
                f"--strategy {config.strategy} lives in {config.entry.chapter}/: start it there, or from the "
                f"repository's root"
            )
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
