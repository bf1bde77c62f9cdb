"""Patterns: what an exercise asks of the messages, for the tables of exercises in the chapters' grading.py.

A pattern is called with each rank's list of ledger entries, and raises Wrong where they are not as asked. Those
below are general; what only one exercise asks for stands in its chapter.
"""

from collections.abc import Sequence

import torch

from common.grading.engine import ExerciseCase, Wrong
from common.grading.reasons import of_messages
from common.lab.ledger import LedgerEntry


def numbered(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank `rank`'s input: element k is (k + 1) * 10**rank. So a sum shows at a glance which ranks are in it
    (1011: all but rank 2), and is exact in float32."""
    return torch.arange(1, elements + 1).to(dtype) * 10**rank


def messages_of(entries: list[list[LedgerEntry]]) -> list[list[tuple[int, int]]]:
    """(receiver, bytes) of each rank's messages, in order. Messages of nothing are left out: a solution may send
    an empty chunk or not. Raises Wrong if anything but sends and receives was used."""
    for rank, own in enumerate(entries):
        others = [entry.operation for entry in own if entry.operation not in ("send", "recv")]
        if others:
            raise Wrong("only sends and receives", f"a call of {others[0]}", rank)
    sends = [[e for e in own if e.operation == "send" and e.payload] for own in entries]
    return [[(e.peer, e.payload) for e in own if e.peer is not None] for own in sends]


def in_words(messages: list[tuple[int, int]]) -> str:
    return ", ".join(f"{nbytes} bytes to rank {peer}" for peer, nbytes in messages) or "nothing sent"


def exactly(expected: list[list[tuple[int, int]]], any_order: bool = False):
    """The pattern of exactly these messages (receiver, bytes) of each rank."""

    def pattern(entries):
        for rank, (want, sent) in enumerate(zip(expected, messages_of(entries), strict=True)):
            want = [message for message in want if message[1]]
            if (sorted(want) != sorted(sent)) if any_order else (want != sent):
                raise Wrong(in_words(want), in_words(sent), rank, why=of_messages(want, sent))

    return pattern


def calls_in_words(calls: Sequence[tuple[str, int]], about: str = "") -> str:
    return ", ".join(f"{operation} of {about}{nbytes} bytes" for operation, nbytes in calls) or "nothing sent"


def collectives(*expected: tuple[str, int], at_most: bool = False):
    """The pattern of exactly these collectives (operation, payload in bytes) on every rank, in this order, and
    nothing else. With `at_most` each payload may be smaller. The payload is that of `common.lab.ledger.wire_bytes`:
    of an all_gather, the gathered result."""

    def pattern(entries):
        for rank, own in enumerate(entries):
            got = [(entry.operation, entry.payload) for entry in own]
            pairs = zip(expected, got, strict=False)
            same = len(got) == len(expected) and all(
                want[0] == call[0] and (call[1] <= want[1] if at_most else call[1] == want[1]) for want, call in pairs
            )
            if not same:
                about = "at most " if at_most else ""
                why = of_messages(expected, got)
                raise Wrong(calls_in_words(expected, about), calls_in_words(got), rank, why=why)

    return pattern


def nothing_sent(entries: list[list[LedgerEntry]]) -> None:
    """The pattern of an exercise that only calculates."""
    collectives()(entries)


def calculated(size: int, name: str, table: list[tuple]):
    """Cases that only calculate, from rows of arguments and, last, the result. Once is enough: world size 2."""
    if size == 2:
        for *arguments, result in table:
            what = f"{name}({str(arguments)[1:-1]})"
            yield ExerciseCase(what, [tuple(arguments)] * size, [result] * size, nothing_sent)


def sends_at_most(nbytes: int):
    """The pattern that leaves the operations free: each rank sends at most so many bytes, as the ledger counts."""

    def pattern(entries):
        for rank, own in enumerate(entries):
            sent = sum(entry.sent for entry in own)
            if sent > nbytes:
                calls = calls_in_words([(entry.operation, entry.payload) for entry in own])
                raise Wrong(f"at most {nbytes} bytes sent by each rank", f"{sent:g} bytes: {calls}", rank)

    return pattern
