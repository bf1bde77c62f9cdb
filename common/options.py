"""How an option is declared, by the run and by each strategy: a field with a default, a help text and its choices."""

from dataclasses import dataclass, field

LATEST = "latest"  # what --resume means without a value


def option(
    default,
    help: str,
    choices: tuple = (),
    identity: bool = False,
    at_least=None,
    at_most=None,
    bare: str = "",
    takes: str = "",
):
    """A dataclass field that is an option: `batch_size: int = option(32, "examples")` is --batch-size on the command
    line and batch-size in a YAML file.

    choices:  the values that are allowed; () for all
    identity: it defines the numbers of a run, so a resumed run has to keep it
    at_least: the smallest number that is allowed; at_most: the largest
    bare:     what it means where it is given without a value, as --resume may be
    takes:    what stands for its value in --help (default: the type)
    """
    about = {
        "help": help,
        "choices": choices,
        "identity": identity,
        "at_least": at_least,
        "at_most": at_most,
        "bare": bare,
        "takes": takes,
    }
    return field(default=default, metadata=about)


@dataclass
class StrategyOptions:
    """The options that a strategy has of its own: the fields of a subclass, each made by `option`."""

    @property
    def trains(self) -> bool:
        """Whether a run with these options trains, and so needs a folder of its own."""
        return True

    def require(self, config) -> None:
        """Raise UserError for values that cannot work with the run's other settings."""


def flag(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")
