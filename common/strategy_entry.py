"""A line of the table of strategies: what is known of one before it, and with it PyTorch, is imported."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from common.declared import Declared, declared
from common.errors import UserError

if TYPE_CHECKING:  # it imports torch
    from common.strategy import Strategy


@dataclass(frozen=True)
class Engine:
    """A library that implements a strategy and is not among the course's own packages (requirements-engines.txt).

    package: what it is imported as
    place:   the class that uses it, as "module:class"
    """

    package: str
    place: str

    def load(self) -> "type[Strategy]":
        """The class that uses it."""
        return resolve_name(self.place)


class Classes(Mapping[str, "type[Strategy]"]):
    """Classes by name, each imported from its place, "module:class", when it is asked for."""

    def __init__(self, places: Mapping[str, str]):
        self.places = dict(places)

    def __getitem__(self, name: str) -> "type[Strategy]":
        return resolve_name(self.places[name])

    def __contains__(self, name) -> bool:  # the inherited one would import the class
        return name in self.places

    def __iter__(self):
        return iter(self.places)

    def __len__(self):
        return len(self.places)


@dataclass(frozen=True)
class StrategyEntry:
    """A line of the table of strategies (course/strategies.py): where one lives and what is promised of it.

    chapter:     the chapter's folder
    main_place:  the function that trains it, as "module:function"
    places:      the classes that implement it, as "module:class", by name: "pytorch", "by-hand", ...
    world_sizes: on how many ranks it must equal one process; a dict gives them by implementation
    engines:     more implementations by name, which need a library of their own
    """

    chapter: str
    main_place: str
    places: Mapping[str, str]
    world_sizes: tuple[int, ...] | dict[str, tuple[int, ...]]
    engines: Mapping[str, Engine] = field(default_factory=dict)

    @property
    def implementations(self) -> Mapping[str, "type[Strategy]"]:
        """The classes by name, each imported when it is asked for."""
        return Classes(self.places)

    @property
    def main(self) -> Callable:
        """The function that trains, of the chapter's script."""
        return resolve_name(self.main_place)

    def implementation(self, name: str) -> "type[Strategy]":
        """The class of an implementation. Raises UserError where the library of an engine is not installed."""
        self.require(name)
        return self.implementations[name] if name in self.places else self.engines[name].load()

    def require(self, name: str) -> None:
        """Raise UserError where the library of an engine is not installed."""
        if name in self.engines and importlib.util.find_spec(self.engines[name].package) is None:
            raise UserError(
                f"--implementation {name}: this Python has no package {self.engines[name].package}; "
                f"pip install -r requirements-engines.txt, in the repository's root"
            )

    def declared(self, name: str) -> Declared:
        """What an implementation declares, without importing it."""
        return declared(self.places[name] if name in self.places else self.engines[name].place)

    def sizes(self, implementation: str) -> tuple[int, ...]:
        """On how many ranks this implementation must equal one process."""
        return self.world_sizes[implementation] if isinstance(self.world_sizes, dict) else self.world_sizes
