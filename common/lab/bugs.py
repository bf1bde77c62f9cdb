"""Planted bugs: a chapter's by_hand.py with one mistake in it, for readers to find and for checks to refuse.

A bug is written down as what is right and what stands there instead, and made by putting the one for the other in
by_hand.py, or in another file of the chapter. So all the rest is right, and stays so when that file changes.
"""

import ast
import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.did_you_mean import did_you_mean
from common.errors import Parser, UserError, one_line_errors


@dataclass(frozen=True)
class Bug:
    """One mistake.

    target:     the function or class that is broken by it
    right:      text of `file`, the first such text at or after the line that defines `inside`
    wrong:      what stands there instead
    refused_by: the check that must refuse it
    why:        what goes wrong, and when it is not noticed
    inside:     a function or class, by default the target
    ranks:      a number of ranks on which it must be refused
    file:       a file of the chapter
    """

    target: str
    right: str
    wrong: str
    refused_by: str
    why: str
    inside: str = ""
    ranks: int = 4
    file: str = "by_hand.py"


class Bugs(dict):
    """The bugs of a chapter by name: Bugs(__file__, {name: Bug(...), ...}) in its bugs.py."""

    def __init__(self, file: str, bugs: dict[str, Bug]):
        super().__init__(bugs)
        self.folder = Path(file).parent.parent  # the chapter: bugs.py stands in its classroom/

    def source(self, name: str) -> str:
        """The file with the bug in it. Raises ValueError if it has no such place any more."""
        bug = self[name]
        text = (self.folder / bug.file).read_text()
        where = bug.inside or bug.target
        define = re.search(rf"^ *(def|class) {where}\(", text, re.MULTILINE)
        place = text.find(bug.right, define.start()) if define else -1
        if place < 0:
            raise ValueError(f"bug {name}: {bug.file} has no {bug.right!r} in or after {where} any more")
        return text[:place] + bug.wrong + text[place + len(bug.right) :]

    def plant(self, name: str):
        """The broken function or class, called like the right one."""
        text, filename = self.source(name), f"<{name}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)  # for tracebacks
        namespace = {"__name__": name, "os": os}
        exec(compile(text, filename, "exec"), namespace)
        return namespace[self[name].target]

    def excerpt(self, name: str) -> str:
        """The functions or the class in which the mistake is, somewhere."""
        text = self.source(name)
        wanted = {self[name].target, *(bug.inside for bug in self.values() if bug.file == self[name].file)}
        nodes = [
            node
            for node in ast.parse(text).body
            if wanted & {getattr(part, "name", None) for part in ast.walk(node)}  # a method's class
        ]
        return "\n\n\n".join(ast.get_source_segment(text, node) or "" for node in nodes)

    def command_line(self) -> None:
        parser = Parser(description="Code with one mistake in it. Can you find it?")
        parser.add_argument("name", nargs="?", help="which; without one, all are listed")
        parser.add_argument("--answer", action="store_true", help="show the mistake")
        with one_line_errors():
            options = parser.parse_args()
            if options.name is not None and options.name not in self:
                hint = did_you_mean(options.name, self, otherwise="without a name, all are listed")
                raise UserError(f"there is no bug '{options.name}' here; {hint}")
        if options.name is None:
            print("\n".join(self))
        elif options.answer:
            bug = self[options.name]
            print(f"right:\n    {bug.right}\nwritten:\n    {bug.wrong}\nrefused by: {bug.refused_by}\n{bug.why}")
        else:
            print(self.excerpt(options.name))
