"""Why an answer is wrong, where that can be told from the answer alone, whatever the exercise.

What is known of one exercise only stands in its row (`mistakes`, common/grading/engine.py), and comes before these.
"""

import itertools
import math
import re
from collections.abc import Sequence
from numbers import Real

import torch

WRITTEN = (
    "An operation in place has changed a tensor that belongs to the caller: a collective or recv into an argument, or "
    "`+=`, or a view of it. Work on a clone."
)

OF_OTHER_SIZE = (
    "A receive has another size than the message that comes to it, and gloo says nothing about it where there is room: "
    "compare shape and type of what is sent and of what is received into."
)
MORE_OR_FEWER = (
    "There is a receive for each message, or should be: who sends one that nobody takes, or waits for one too many? "
    "A message of nothing is one, too."
)
NEVER_WRITTEN = (
    "This is not a number: was it read before it had arrived, or never written? torch.empty holds whatever lay there. "
    "Wait for every request, and look for the part that nobody sends, or for a division of nothing by nothing."
)


def of_a_receive_left_alone(receiver: int, sender: int) -> str:
    return (
        f"Rank {receiver} has started a receive of rank {sender}'s message and has returned without waiting for it. "
        "What irecv returns has to be waited for, or nothing may have come."
    )


def of_a_deadlock(ends: list[str]) -> str:
    """Why ranks wait for each other, from how each of them ended ("waiting in send, ...", "had returned")."""
    waits = [end for end in ends if end.startswith("waiting")]
    if any(end == "had returned" for end in ends):
        return (
            "A rank has returned while another still waits for it: one of the two sends or receives once too often, or "
            "names another partner. Write down both lists of messages, side by side."
        )
    if all(end.startswith("waiting in send") for end in waits):
        return (
            "dist.send waits until the other rank receives, and all of these are still sending. Start sends with "
            "dist.isend and wait for them after the receives, or use dist.batch_isend_irecv."
        )
    # "A message" is what a rank says whose partner has given up first.
    if all(end.startswith(("waiting in recv", "waiting for a recv", "waiting for a message")) for end in waits):
        return (
            "These ranks wait for messages that nobody has sent: does anybody send to them, in this direction, and "
            "before it waits itself?"
        )
    if any("recv" in end or "send" in end or "message" in end for end in waits):
        return (
            "For each line above: which rank should answer, and is it waiting in the same message, the same direction? "
            "A send needs a receive from exactly this rank."
        )
    return "Every rank of the group has to make the same collectives in the same order: one of them makes another."


def of_an_error(text: str) -> str:
    if "SIGABRT" in text:
        return (
            "A rank receives into a tensor that is smaller than what another sends to it, or gives a collective fewer "
            "bytes than the others: print shape and type on every rank. Lengths may be uneven, torch.empty makes "
            "float32 unless it is told, and what is sent may be another rank's part."
        )
    if "waiting in new_group" in text:
        return "dist.new_group is a collective: every rank calls it for every group, in one order, in it or not."
    if text.startswith("no end after"):
        return "The loop at this line goes on for ever: what would end it, and does that change with each turn?"
    if re.search(r"'(int|float)' object has no attribute", text):
        return "This is a number of Python where a tensor is meant: sum() of no tensors at all is 0, without a method."
    if "is not connected" in text:
        return "Messages go to another rank, and one that exists: is the partner this rank itself? Print it."
    if "NoneType" in text or "of type torch.Tensor" in text:
        return "One of the arguments is None on this rank: its docstring says on which ranks, and what they do instead."
    if re.search("must match the size|cannot be multiplied|same number of dimensions", text):
        return "Two tensors of different shapes meet in this line: print both. Is one whole, and the other a part?"
    if "doesn't match" in text and "dimension" in text or "invalid for input of size" in text:
        return "The shape is not what this line takes it for: print it. Lengths need not divide by the world size."
    return ""


def given(expected, got, arguments: list[tuple], rank: int) -> str:
    """Whether what came on a rank, or the first item of it that is wrong, is what some rank was given."""
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        return next((given(a, b, arguments, rank) for a, b in zip(expected, got, strict=True) if not same(a, b)), "")
    if not isinstance(got, torch.Tensor) or not got.numel():
        return ""
    for other in [rank, *range(len(arguments))]:
        inside = [argument if isinstance(argument, (list, tuple)) else [argument] for argument in arguments[other]]
        if any(same(got, one) for one in itertools.chain(*inside)):
            who = "this rank itself" if other == rank else f"rank {other}"
            return f"This is what {who} was given, unchanged."
    return ""


def of_a_root(calls: Sequence[tuple[str, int | None]], rank: int) -> str:
    """Why a rank may have another result: of its calls (operation, root or partner), one that gives it to another."""
    for operation, root in calls:
        if operation in ("reduce", "gather") and root not in (None, rank):
            return f"{operation} leaves its result on rank {root} alone; rank {rank} has what it had before."
    return ""


def relation(expected, got, ranks: int) -> str:
    """How what came is related to what was expected, in words; empty where nothing is known.

    ranks: the world size, or 0 where all ranks calculate the same and their number says nothing
    """
    if isinstance(expected, list) and isinstance(got, list):
        return of_lists(expected, got, ranks)
    if isinstance(expected, bool) or isinstance(got, bool):
        return ""
    if isinstance(expected, Real) and isinstance(got, Real):
        if isinstance(expected, int) and isinstance(got, int):
            return ""  # an index or a count, of which nothing was averaged
        return of_numbers(float(expected), float(got), ranks)
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor) and expected.numel():
        return of_tensors(expected, got, ranks)
    return ""


def of_numbers(expected: float, got: float, ranks: int) -> str:
    if math.isnan(got) and not math.isnan(expected):
        return NEVER_WRITTEN
    if not ranks or not expected or not got:
        return ""
    if expected > 0 and expected != 1 and math.isclose(got, expected**2, rel_tol=1e-5):
        return "This is the square of what it should be: the root is missing, or taken of a part only."
    if expected > 0 and got > 0 and math.isclose((got / expected) ** 2, 1 / ranks, rel_tol=1e-4):
        return f"This is 1/sqrt({ranks}) of it, and there are {ranks} ranks: a mean under the root in place of a sum."
    return of_a_factor(got / expected, ranks)


def of_messages(expected: Sequence[tuple], got: Sequence[tuple]) -> str:
    """How messages (of what kind or to whom, bytes) are related to those that were asked for."""
    if len(got) > 1 and len(expected) == len(got) and sorted(expected) == sorted(got):
        return "These are the right ones in another order."
    if expected and got and {kind for kind, _ in expected} == {kind for kind, _ in got}:
        if sum(nbytes for _, nbytes in expected) == sum(nbytes for _, nbytes in got) and len(expected) != len(got):
            more = len(got) > len(expected)
            return f"These are as many bytes in all, in {'more' if more else 'fewer'} messages than were asked for."
        if len(expected) == len(got):
            return "There are as many as were asked for, of another size: look at the type, and at how much is in them."
    return ""


def of_lists(expected: list, got: list, ranks: int) -> str:
    if len(expected) != len(got):
        return of_one_item_more(expected, got)
    wrong = [place for place, (a, b) in enumerate(zip(expected, got, strict=True)) if not same(a, b)]
    if len(wrong) > 1 and all(any(same(expected[a], got[b]) for b in wrong) for a in wrong):
        return f"These are the right results, but items {', '.join(map(str, wrong))} have changed places."
    return relation(expected[wrong[0]], got[wrong[0]], ranks) if wrong else ""


def of_one_item_more(expected: list, got: list) -> str:
    """Which item is missing, or one too many, where all others are right."""
    short, long = sorted((expected, got), key=len)
    for place in range(len(long)) if len(long) == len(short) + 1 else ():
        if same(short, long[:place] + long[place + 1 :]):
            return f"Item {place} is {'missing' if short is got else 'one too many'}; the others are right."
    return ""


def of_tensors(expected: torch.Tensor, got: torch.Tensor, ranks: int) -> str:
    if expected.dtype != got.dtype:
        return ""
    if expected.dim() == 2 and same(expected.T, got):
        return "This is the transpose of the right result."
    if expected.shape != got.shape:
        if expected.numel() == got.numel() and same(expected.flatten(), got.flatten()):
            return "These are the right numbers in another shape."
        return ""
    if got.is_floating_point() and (got.isnan() & ~expected.isnan()).any():
        return NEVER_WRITTEN
    there, here = expected.double().flatten(), got.double().flatten()
    if there.any() and here.isfinite().all() and here.abs().max() > 1e9 * there.abs().max():
        return NEVER_WRITTEN.replace("is not a number", "is no number of this size")
    if not here.any():
        return (
            "There are zeros only: was this never written, read before it had arrived (wait), or cut out of the wrong "
            "place of something larger?"
        )
    if there.any() and here.isfinite().all():
        factor = float(here @ there / (there @ there))
        if factor and torch.allclose(here, factor * there, rtol=1e-4, atol=0):
            several = not torch.allclose(there, there[:1], rtol=1e-4, atol=0)  # or any number would be a factor
            alike = f"Each number is {factor:.4g} times what it should be." if several else ""
            return of_a_factor(factor, ranks) or alike
    if there.numel() > 2 and torch.equal(there.sort().values, here.sort().values):
        return "These are the right numbers in another order."
    return ""


def speaks_of_ranks(why: str, ranks: int) -> bool:
    """Whether a reason rests on there being so many ranks. Where there are two, half and twice may be anything else."""
    return f"there are {ranks} ranks" in why


def of_a_factor(factor: float, ranks: int) -> str:
    if math.isclose(factor, -1, rel_tol=1e-4):
        return "The sign is turned round."
    if ranks and math.isclose(factor, ranks, rel_tol=1e-4):
        return (
            f"This is {ranks} times what it should be, and there are {ranks} ranks: a sum where the mean was asked "
            "for, or something that every rank has already was summed over them."
        )
    if ranks and math.isclose(factor, 1 / ranks, rel_tol=1e-4):
        return (
            f"This is 1/{ranks} of what it should be, and there are {ranks} ranks: divided by their number once too "
            "often, or by it at all where a sum was asked for."
        )
    return ""


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=0)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Real) and isinstance(b, Real):
        return math.isclose(a, b, rel_tol=1e-6)
    return type(a) is type(b) and a == b
