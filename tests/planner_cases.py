"""What tests of the planner borrow: what its commands say, meshes in words, and three models whose bytes and times are
worked out by hand.

Each of the models has four layers, is 1,000 wide and takes a micro-batch of 1,000 tokens. So the stream of a
micro-batch has 2 MB in 16 bit, and a layer 12,002,000 parameters: four million of attention, eight of its MLP, and two
norms. The head and the embedding have a million each, and the last norm a thousand: 50,009,000 in all.
"""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from planner import models
from planner.__main__ import main
from planner.layout import Layout

GPT = models.Model("gpt", 4, 1000, 10, 1000)
TIED = replace(GPT, tied=True)
MIXED = replace(GPT, experts=2, top_k=2, expert_width=4000, mlp_width=4000, dense_layers=2)


def say(line: str) -> str:
    """What a command of the planner's prints."""
    with redirect_stdout(io.StringIO()) as printed:
        main(line.split())
    return printed.getvalue()


def say_json(line: str) -> Any:
    return json.loads(say(f"{line} --json"))


def refusal(line: str) -> str:
    """The one line that is said of a command that cannot be, which prints nothing else and ends with code 2."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as error, pytest.raises(
        SystemExit) as end:  # fmt: skip
        main(line.split())
    said = error.getvalue()
    assert (end.value.code, printed.getvalue(), said.count("\n")) == (2, "", 1) and said.startswith("error: "), said
    return said


def mesh_of(text: str) -> dict[str, int]:
    """Of "pipeline=2 data=2"."""
    return {axis: int(size) for axis, _, size in (word.partition("=") for word in text.split())}


def layout(text: str, many: int = 1, **fields) -> Layout:
    """Of a mesh such as "pipeline=2 data=2"; many: micro-batches of a reader."""
    one = Layout(tuple(mesh_of(text).items()), 1, **({"sequence": 1000} | fields))
    return replace(one, batch_size=one.readers * many)
