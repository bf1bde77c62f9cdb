"""The command line and the configuration file: the run's options, and those that the chosen strategy brings.

Read in two passes: the first finds out which strategy it is, the second knows that strategy's options too. Neither
needs PyTorch; what does comes last. (argparse does the reading. jsonargparse was tried: it has no did-you-mean, reports
an option of another strategy as unknown, and would need this file's second half all the same.)
"""

import argparse
import functools
import math
import re
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from common import ROOT, stored
from common.axes import AXES, in_order, parse_axes, parse_order, resolve
from common.config import Config, check, check_alone, check_combinations, check_launch, check_values, shared
from common.constants import MOST_RANKS
from common.did_you_mean import did_you_mean, nearest_option
from common.errors import Parser, UserError
from common.launcher import environment
from common.options import flag
from common.run_dir import saved_settings

if TYPE_CHECKING:  # it imports torch
    from common.strategy_entry import StrategyEntry

OLD = {"accumulate": "--accumulation-steps", "replicas": "--mesh, as in --mesh data=2"}  # what is said in their place
# Belong to the machine or to how it was started, not to the run: a resumed run does not take them over.
ANEW = ("distributed", "download", "backend", "device", "mesh", "mesh_order", "implementation", "by_hand", "resume",
        "timeout")  # fmt: skip


def parse(table: "Mapping[str, StrategyEntry]", *how, **more) -> Config:
    """Read the command line, all of it; the arguments are those of `read`. Nothing is written: whoever trains calls
    common.run_dir.claim next. Raises UserError for what cannot work and is known before ranks meet."""
    return read(table, *how, **more)()


def read(
    table: "Mapping[str, StrategyEntry]",
    default_strategy: str | None = None,
    argv: list[str] | None = None,
    by_axes: Mapping[frozenset, str] | None = None,
    default_implementation: str = "pytorch",
    auto: Callable[[list[str]], list[str]] | None = None,
    home: str | None = None,
) -> Callable[[], Config]:
    """Read command line, --config file and, on --resume, the run's own settings, as far as that needs no PyTorch, whose
    import takes most of the time of a refusal; the first that says it wins. What is returned does the rest, with it.

    `table` has the strategies. Where none is named it is that of the --mesh, as `by_axes` has it for sets of axes or
    else "mesh"; then `default_strategy`; then "ddp" for --distributed, and "single". `auto` gives a command line that
    names one in the place of --strategy auto. `home` is the one chapter whose strategies are taken, if there is one.
    Raises UserError.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add(first, "the run", shared())
    first.add_argument("--config")
    found, words = first.parse_known_args(argv)
    early = vars(found)
    file = early.pop("config", None)
    content, spelled = read_yaml(Path(file)) if file else ({}, {})
    for item in shared():
        if item.name in content:
            content[item.name] = convert(f"--config {file}: {spelled[item.name]}", content[item.name], item)
    if not {"-h", "--help"} & {*argv}:
        refuse_at_once(words, f"--config {file}", content, spelled, early)
    kept = saved_settings({**content, **early}) if ({**content, **early}).get("resume") else {}
    kept = as_options(kept, shared())
    known_settings(table, kept)
    chosen = {**content, **early}
    if chosen.get("strategy") == "auto" and auto:
        return lambda: parse(table, default_strategy, auto(argv), by_axes, default_implementation, home=home)
    if "strategy" in kept and can_have(table, kept["strategy"], chosen.get("mesh", "")):
        chosen = {"strategy": kept["strategy"], **chosen}  # else the mesh says what a resumed run goes on with
    name = chosen.get("strategy") or by_mesh(chosen, table, by_axes or {}, default_strategy)
    name = name or default_strategy or ("ddp" if chosen.get("distributed") else "single")
    entry = find(table, name)
    if home and entry.chapter != home:
        there = "start it there, or from the repository's root"
        raise UserError(f"--strategy {name} lives in {entry.chapter}/: {there}")
    if kept.get("strategy") == name and not ({"implementation", "by_hand"} & {*content, *early}):
        chosen["implementation"] = kept.get("implementation") or ("by-hand" if kept.get("by_hand") else "pytorch")
    implementation = implementation_of(name, entry, chosen, default_implementation)
    Options = entry.declared(implementation).Options
    known = {item.name: item for item in [*shared(), *fields(Options)]}
    for key in content:
        if key not in known:
            refuse_foreign(table, flag(key), name, implementation, f"--config {file}: ")

    parser = full_parser(table, name, Options)
    if {"-h", "--help"} & {*argv}:
        parser.epilog = other_options(table, Options)
    parsed, unknown = parser.parse_known_args(argv)
    given = vars(parsed)
    for word in unknown[:1]:  # a value that no option takes
        refuse_foreign(table, word, name, implementation)
    entry.require(implementation)
    given.pop("config", None)
    from_file = {key: convert(f"--config {file}: {spelled[key]}", value, known[key]) for key, value in content.items()}
    values = {**from_file, **given}
    if kept:
        kept = as_options(kept, fields(Options))
        values = resumed(kept, values, known, same_strategy=kept.get("strategy") == name)
    own = {item.name: values.pop(item.name) for item in fields(Options) if item.name in values}
    config = Config(**values, options=Options(**own), entry=entry)
    config.strategy, config.implementation, config.by_hand = name, implementation, implementation == "by-hand"
    config.axes = axes_of(config)
    check_alone(config)

    def finish() -> Config:
        config.options = config.strategy_class.Options(**own)
        check(config)
        return config

    return finish


def refuse_at_once(words: list[str], where: str, content: dict, spelled: dict, early: dict) -> None:
    """Raise UserError for what can be refused without PyTorch, whose import takes most of the time of a refusal:
    options that nobody has, values of those that all strategies share, and how processes were started.

    words:   of the command line, without the options that all share
    content: the options of the file `where`, as `spelled` there; early: those of the command line that all share
    """
    known = [*(item.name for item in shared()), "config", *own_names()]
    if words and not words[0].startswith("--"):
        raise UserError(f"unrecognized argument: {words[0]} (--help lists the options)")
    for word in words:
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in known:
            refuse_unknown(word.split("=")[0], name, known)
    for key in content:
        if key not in known:
            refuse_key(where, key, spelled[key], known)
    for name, what in (("text", "a file or a folder, or leave it out for Python's own library"), ("mesh", "axes"),
                       ("run_dir", "a folder, or leave it out for a new one under runs/")):  # fmt: skip
        if early.get(name) == "":  # such as of a variable that is not set
            raise UserError(f"{flag(name)} is empty; name {what}")
    given = {**content, **early}
    config = Config(**{item.name: given[item.name] for item in shared() if item.name in given})
    check_values(config)
    if not config.resume:  # which brings values, too
        check_launch(config)
        check_combinations(config)


@functools.cache
def own_names() -> frozenset[str]:
    """The options that some strategy has of its own, and perhaps others, as the chapters' files declare them: their
    classes would have to be imported, and PyTorch with them."""
    files = [*ROOT.glob("[0-9][0-9]_*/*.py"), *Path(__file__).parent.glob("*.py")]
    pattern = re.compile(r"^ +(\w+): \w+ = option\(", re.M)
    return frozenset(name for file in files for name in pattern.findall(file.read_text()))


# --- which strategy -------------------------------------------------------------------------------------------


def find(table, name: str) -> "StrategyEntry":
    """A strategy's line of the table. Raises UserError for an unknown name."""
    if name not in table:
        hint = did_you_mean(name, table)
        raise UserError(f"unknown strategy '{name}'; {hint}{' ' if hint else ''}known: {', '.join(table)}")
    return table[name]


def known_settings(table, kept: dict) -> None:
    """Raises UserError, which names the run, where the settings of a run to resume name a strategy or an implementation
    that is not there."""
    try:
        if kept.get("strategy"):
            entry = find(table, kept["strategy"])
            if kept.get("implementation"):
                implementation_of(kept["strategy"], entry, {"implementation": kept["implementation"]})
    except UserError as error:
        short = re.sub(r"(\S{60})\S+", r"\1...", str(error))  # whoever has damaged them may have written much
        raise UserError(f"the settings of {kept['run_dir']}: {short}") from None


def can_have(table, name: str, mesh: str) -> bool:
    """Does some implementation of a strategy have the axes that --mesh names, if it names any?"""
    wanted = {*parse_axes(mesh)} if "=" in mesh else set()
    entry = find(table, name)
    return any(wanted <= {*kind.axes, *kind.preset} for kind in map(entry.declared, entry.places))


def by_mesh(chosen: dict, table, by_axes, default: str | None) -> str | None:
    """The strategy whose axes are those that --mesh names; "mesh" where there is none, or none by hand if that is
    asked for. A chapter's own strategy comes first if it has these axes."""
    if "=" not in chosen.get("mesh", ""):
        return None
    if default and can_have(table, default, chosen["mesh"]):
        return default
    name = by_axes.get(frozenset(parse_axes(chosen["mesh"])), "mesh")
    by_hand = chosen.get("by_hand") or chosen.get("implementation") == "by-hand"
    return "mesh" if by_hand and "by-hand" not in table[name].implementations else name


def implementation_of(name: str, entry: "StrategyEntry", chosen: dict, default: str = "pytorch") -> str:
    """Which implementation is meant. Raises UserError where the strategy does not have it."""
    wanted = chosen.get("implementation") or ("by-hand" if chosen.get("by_hand") else default)
    if chosen.get("by_hand") and wanted != "by-hand":
        raise UserError(f"--by-hand and --implementation {wanted} exclude each other; leave one out")
    if wanted in entry.implementations or wanted in entry.engines:
        return wanted
    there = ", ".join([*entry.implementations, *entry.engines])
    if wanted == "by-hand":
        raise UserError(f"--by-hand: strategy '{name}' has no version by hand; leave it out")
    if list(entry.implementations) == ["by-hand"]:
        raise UserError(f"strategy '{name}' has a version by hand only; add --by-hand")
    raise UserError(f"strategy '{name}' has no implementation '{wanted}'; it has {there}")


# --- mesh -----------------------------------------------------------------------------------------------------


def axes_of(config: Config) -> dict[str, int]:
    """The sizes of the mesh: the strategy's preset, with what --mesh says. Raises UserError."""
    kind, size = config.entry.declared(config.implementation), environment()[1]
    if config.dry_run and size == 1 and "=" in config.mesh:  # nobody has to be started
        size = math.prod(parse_axes(config.mesh).values())
        if size > MOST_RANKS:
            raise UserError(f"--mesh {config.mesh}: at most {MOST_RANKS} ranks, got {size}: no cluster has more")
    preset, allowed = kind.preset, kind.axes or tuple(kind.preset)
    order = parse_order(config.mesh_order)
    numbers = re.fullmatch(r"(\d+)x(\d+)", config.mesh)
    if numbers and len(preset) == 2:
        advice = ",".join(f"{name}={number}" for name, number in zip(preset, numbers.groups(), strict=True))
        raise UserError(f"--mesh {config.mesh}: the axes have names; write --mesh {advice}")
    if config.mesh and "=" not in config.mesh:
        raise UserError(f"--mesh {config.mesh}: expected sizes of axes as in data=2,tensor=2; axes: {', '.join(AXES)}")
    named = parse_axes(config.mesh) if config.mesh else {}
    foreign = next((name for name in named if name not in allowed), None)
    if foreign:
        has = f"axis {allowed[0]} only" if len(allowed) == 1 else f"axes {', '.join(allowed)}"
        by_hand = config.entry.declared("by-hand") if "by-hand" in config.entry.places else None
        advice = "leave --strategy out, and the mesh says what is done"
        if by_hand and not config.by_hand and set(named) <= {*by_hand.axes, *by_hand.preset}:
            advice = "add --by-hand"
        elif config.strategy == "mesh":
            advice = "leave it out"
        raise UserError(
            f"--mesh {config.mesh}: strategy '{config.strategy}'{' by hand' if config.by_hand else ''} has {has}, not "
            f"'{foreign}'; {advice}"
        )
    axes = resolve(with_preset(named, preset), size)
    lacking = [name.strip() for name in config.mesh_order.split(",") if config.mesh_order and name.strip() not in axes]
    if lacking:
        raise UserError(
            f"--mesh-order {config.mesh_order}: this mesh has no axis '{lacking[0]}', but {', '.join(axes)}"
        )
    return in_order(axes, order)


def with_preset(named: dict[str, int], preset: dict[str, int]) -> dict[str, int]:
    """Who names only some axes of a preset leaves the others to it; any other mesh is as it was named."""
    return {**preset, **named} if set(named) < set(preset) else named


# --- the parser -----------------------------------------------------------------------------------------------


def full_parser(table, name: str, Options) -> Parser:
    """A parser of all options, those of strategy `name` included."""
    parser = Parser(
        usage="%(prog)s [OPTION ...]",
        description="Train a small model on one process or on many. README.md has examples.",
        formatter_class=lambda prog: Help(prog, max_help_position=25),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    listed = "strategies: " + ", ".join(table)
    group: list[Field] = []
    titles = list(Config.GROUPS.values())
    starts = list(Config.GROUPS)
    for item in shared():
        if item.name in starts and group:
            add(parser, titles[starts.index(group[0].name)], group, listed if group[0].name == "strategy" else None)
            group = []
        group.append(item)
    add(parser, titles[-1], group)
    if fields(Options):
        add(parser, f"strategy {name}", fields(Options))
    others = parser.add_argument_group("this program")
    others.add_argument("-h", "--help", action="help", help="show this; with --strategy NAME, that strategy's options")
    others.add_argument("--config", metavar="FILE.yaml", help="read options from a file; the command line wins")
    return parser


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of what stands at the end, which other_options breaks by itself."""


def other_options(table, Options) -> str:
    """The end of --help: options that other strategies have, with their choices and who has them."""
    own = {item.name for item in fields(Options)}
    found: dict[str, Field] = {}
    for entry in table.values():
        for kind in map(entry.declared, entry.places):
            found |= {item.name: item for item in fields(kind.Options) if item.name not in own}
    lines = ["options of other strategies (--strategy NAME --help says what they do):"]
    width = min(100, shutil.get_terminal_size().columns - 2)
    for name, item in found.items():
        text = f"{', '.join(map(str, item.metadata['choices']))}; " if item.metadata["choices"] else ""
        holders = list(dict.fromkeys(holder.split(" (")[0] for holder in owners(table, name)))
        text = f"{flag(name):22} {text}of {', '.join(holders)}"
        lines.append(
            textwrap.fill(text, width, break_on_hyphens=False, initial_indent="  ", subsequent_indent=" " * 25)
        )
    return "\n".join(lines)


def add(parser: Parser, title: str, items, about: str | None = None) -> None:
    """A group of options to a parser, from fields; `about` is a line below its title."""
    about = about and textwrap.fill(about, min(100, shutil.get_terminal_size().columns - 2), break_on_hyphens=False)
    group = parser.add_argument_group(title, about)
    for item in items:
        about = item.metadata["help"].replace("%", "%%")
        if item.type is bool:
            group.add_argument(flag(item.name), action="store_true", help=about)
        else:
            choices = item.metadata["choices"] or None
            about += f" (default: {item.default})" if item.default != "" else ""
            bare = item.metadata["bare"]
            metavar = item.metadata["takes"] or item.type.__name__.upper().replace("STR", "WORD")
            if choices and len(", ".join(choices)) > 40:
                about = f"{', '.join(choices)}: {about}"
            elif choices:
                metavar = None  # which shows them
            more = {"nargs": "?", "const": bare} if bare else {}
            group.add_argument(flag(item.name), type=item.type, choices=choices, metavar=metavar, help=about, **more)


def owners(table, option: str) -> list[str]:
    """The strategies that have an option of this name, "(by hand)" where only that implementation has it."""
    found = []
    for name in table:
        kinds = table[name].implementations
        having = [kind for kind in kinds if option in table[name].declared(kind).names]
        if having:
            found.append(name if len(having) == len(kinds) else f"{name} ({', '.join(having)})")
    return found


def refuse_foreign(table, word: str, strategy: str, implementation: str, where: str = "") -> None:
    """Raise the UserError for an option that another strategy has."""
    option = word.lstrip("-").split("=")[0].replace("-", "_")
    has = owners(table, option)
    if not word.startswith("--") or not has:
        raise UserError(f"{where}unrecognized argument: {word} (--help lists the options)")
    by_hand = " by hand" if implementation == "by-hand" else ""
    raise UserError(
        f"{where}{flag(option)} is an option of {', '.join(has)}, not of '{strategy}'{by_hand}; leave it out"
    )


def refuse_unknown(word: str, name: str, known: list[str]) -> None:
    if name in OLD:
        raise UserError(f"there is no option {word}; write {OLD[name]}")
    nearest = nearest_option(name, known)
    hint = f"did you mean {flag(nearest)}?" if nearest else "--help lists the options"
    raise UserError(f"unknown option {word}; {hint}")


def refuse_key(where: str, key: str, spelled: str, known: list[str]) -> None:
    if key in OLD:
        raise UserError(f"{where}: there is no option '{spelled}'; write {OLD[key]}")
    nearest = nearest_option(key, known)
    hint = f"; did you mean '{nearest.replace('_', '-')}'?" if nearest else "; --help lists the options"
    raise UserError(f"{where}: unknown key '{spelled}'{hint}")


# --- the configuration file -----------------------------------------------------------------------------------


def read_yaml(path: Path) -> tuple[dict, dict[str, str]]:
    """Options from a YAML file, by field name, and how the file spells each. Raises UserError."""
    try:
        content = stored.yaml_of(path, stored.read(path)) or {}
    except UserError as error:
        raise UserError(f"--config {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected lines like 'batch-size: 32'")
    for key in content:
        if not isinstance(key, str):
            raise UserError(f"--config {path}: {key!r} is no option; expected lines like 'batch-size: 32'")
    names = {str(key).replace("-", "_"): str(key) for key in content}
    values = {name: content[key] for name, key in names.items()}
    if isinstance(values.get("mesh"), dict):
        values["mesh"] = ",".join(f"{axis}={number}" for axis, number in values["mesh"].items())
    return values, names


def as_options(kept: dict, items) -> dict:
    """Settings that somebody has stored, those of `items` as their options have them. Raises UserError."""
    found = dict(kept)
    for item in items:
        if item.name in found:
            where = f"--resume: {kept.get('run_dir', 'the run')} has {flag(item.name)}"
            value = found[item.name] = convert(where, found[item.name], item)
            if isinstance(value, str) and not value.isprintable():
                raise UserError(f"{where}: {stored.printable(value)!r} is no text")
    return found


def convert(where: str, value, item):
    """YAML reads 1e-3 as text and 1 as an integer; give an option the type that it has on the command line."""
    if isinstance(value, bool) and (item.type is bool or item.metadata["bare"]):
        return value if item.type is bool else item.metadata["bare"] * value
    if item.type is str and isinstance(value, dict):  # "split-spec: {blocks.1: end}"
        value = ", ".join(f"{key}: {word}" for key, word in value.items())
    try:
        if item.type is bool or isinstance(value, bool | list | dict | type(None)):
            raise ValueError
        if item.type is int and float(value) != int(value):
            raise ValueError
        if "\0" in str(value):  # no file can have such a name
            raise ValueError
        value = item.type(value)
    except (ValueError, TypeError, OverflowError):  # of a word, a date, infinity
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
        raise UserError(f"{where}: expected {names[item.type]}, got {reprlib.repr(value)}") from None
    choices = item.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"{where}: expected one of {', '.join(choices)}, got {reprlib.repr(value)}")
    return value


def resumed(kept: dict, values: dict, known: dict, same_strategy: bool) -> dict:
    """Fill in from the run that is resumed. Raises UserError where `values` would change what makes its numbers what
    they are."""
    identity = [name for name, item in known.items() if item.metadata["identity"] and name in kept]
    changed = [name for name in identity if name in values and values[name] != kept[name]]
    if changed:
        changes = ", ".join(f"{flag(name)} {values[name]} (it has {kept[name]})" for name in changed)
        raise UserError(
            f"--resume: a resumed run keeps its settings, but got {changes}; leave that out, or start a new run"
        )
    if "steps" in values and "epochs" not in values:
        kept = kept | {"epochs": 0}  # a length in steps takes the place of one in epochs
    same = all(values.get(name, kept.get(name)) == kept.get(name) for name in ("steps", "epochs"))
    if kept.get("lr_schedule") == "cosine" and not same:
        falls = f"--resume: this run's learning rate falls until its step {kept['steps']}"
        raise UserError(f"{falls}, so --steps has to stay; leave it out")
    own = {item.name for item in shared()}
    taken = {n: v for n, v in kept.items() if n in known and n not in ANEW and (same_strategy or n in own)}
    taken |= {name: kept[name] for name in identity}
    fits = "=" in kept.get("mesh", "") and math.prod(parse_axes(kept["mesh"]).values()) == environment()[1]
    if same_strategy and fits and "mesh" not in values:  # else the strategy's own mesh
        taken |= {"mesh": kept["mesh"], "mesh_order": kept.get("mesh_order", "")}
    return {**taken, **values}
