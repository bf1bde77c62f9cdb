"""What --help shows: every option with what it means and its default, within the width of the terminal."""

import re
from dataclasses import dataclass, fields

import pytest
from helpers import configure

from common import generate, runs
from common.command_line import Parser, add
from common.config import shared
from common.options import option
from course.strategies import STRATEGIES

EVERY = [(name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations]


def shown(line: str, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        configure(line)
    assert end.value.code == 0
    return capsys.readouterr().out


def entries(text: str) -> dict[str, str]:
    """option -> its whole entry, in one line."""
    found, name = {}, None
    for line in text.splitlines():
        begins = re.match(r"  (?:-\w, )?(--[\w-]+)", line)
        name = begins[1] if begins else name if line.startswith(" " * 10) else None
        if name:
            found[name] = " ".join(f"{found.get(name, '')} {line}".split())
    return found


@pytest.mark.parametrize("strategy, implementation", EVERY)
def test_every_option_is_there_once_with_its_default(strategy, implementation, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    kind = STRATEGIES[strategy].implementations[implementation]
    page = shown(f"--strategy {strategy} --implementation {implementation} --help", capsys)
    own = [item for item in fields(kind.Options) if item.init]
    others = {item.name for entry in STRATEGIES.values() for made in entry.implementations.values()
              for item in fields(made.Options)} - {item.name for item in own}  # fmt: skip
    found = entries(page)
    for item in [*shared(), *own]:
        text = found[f"--{item.name.replace('_', '-')}"]
        assert len(text.split()) > 2, f"no help: {text}"
        if isinstance(item.default, (int, float)) and not isinstance(item.default, bool):
            assert re.search(rf"(?<![\w.]){re.escape(str(item.default))}(?![\w.])", text), f"its default: {text}"
    starts = [line.split()[0] for line in page.splitlines() if line.startswith("  --")]
    assert [name for name in {*starts} if starts.count(name) > 1] == [], "an option twice"
    assert {f"--{name.replace('_', '-')}" for name in others} <= found.keys(), "options of other strategies"
    assert all(re.search(rf"(?<![\w+]){re.escape(name)}(?![\w+])", page) for name in STRATEGIES), "strategies"
    assert entries(shown(f"--strategy {strategy} --implementation {implementation} -h", capsys)) == found


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_page_is_as_wide_as_the_terminal_and_not_much_wider_than_a_book(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lengths = [len(line) for line in shown("--strategy zero2 --help", capsys).splitlines()]
    assert max(lengths) <= columns and sorted(lengths)[len(lengths) // 2] < 110


PROGRAMS = {
    generate: ["run"],
    runs: ["list", "summary run", "ranks run", "plot run", "compare run run", "export run"],
}


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_programs_that_look_at_runs_explain_every_option(module, capsys, monkeypatch):
    """And what is meant where an option is left out is what the help says."""
    monkeypatch.setenv("COLUMNS", "300")
    for arguments in map(str.split, PROGRAMS[module]):
        with pytest.raises(SystemExit) as end:
            module.parser().parse_args([*arguments, "--help"])
        found = entries(capsys.readouterr().out)
        assert end.value.code == 0
        for name, value in vars(module.parser().parse_args(arguments)).items():
            option_text = found.get(f"--{name}")
            default = re.search(r"default: '?([^)]*?)'?\)", option_text or "")
            if default and value is not None:
                same = float(default[1]) == value if isinstance(value, float) else default[1] == str(value)
                assert same, f"{name} is {value}: {option_text}"


@dataclass
class Made:
    share: float = option(0.0, "at most 50% of it")
    kind: str = option("aa", "which", ("aa", "b" * 20, "c" * 20))
    bare: str = option("", "may stand alone", bare="this")


def test_percent_signs_long_choices_and_options_that_stand_alone():
    parser = Parser(usage="", add_help=False)
    add(parser, "made up", fields(Made))
    text = " ".join(parser.format_help().split())
    assert "at most 50% of it" in text and all(word in text for word in ("aa", "b" * 20, "c" * 20))
    assert parser.parse_args(["--bare"]).bare == "this" and parser.parse_args(["--bare", "that"]).bare == "that"
