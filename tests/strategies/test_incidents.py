"""The museum of incidents: each mistake has the effect that was reported, and without it all equals one process."""

import inspect
import math
from unittest import mock

import pytest
import torch
from helpers import FULL, code_of_page

from common import ROOT
from course.fsdp.museum import TOLERANCE, compared, differences, in_words, incidents, together

UNSEEN = ("growing_index",)  # every number is right: only the memory is not
HANG = [name for name, incident in incidents().items() if hasattr(incident.broken, "WAIT")]
END = [name for name in incidents() if name not in HANG]


def from_what_was_seen(name) -> bool:
    """An effect that is known from a run alone, and starts no ranks of its own."""
    return "_" not in inspect.signature(incidents()[name].broken.effect).parameters


# The page shows the others, and `make test` compares its outputs; here is one of them, and with FULL=1 all.
EFFECTS = [name for name in END if FULL or from_what_was_seen(name) or name == "leaking_documents"]


@pytest.fixture(scope="module")
def ran():
    """All that run on so many ranks and come to an end, broken and fixed, in one launch, as on a machine with a GPU:
    fully_shard by itself would take it, though the ranks are on the CPU."""
    sizes = {name: incidents()[name].broken.RANKS for name in END}
    with mock.patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")):
        launches = [together(name for name in END if sizes[name] == size) for size in sorted({*sizes.values()})]
    return {name: seen for launch in launches for name, seen in launch.items()}


def test_pages_show_every_incident_beside_one_process():
    code = "\n".join(
        line for page in sorted(ROOT.glob("06_fsdp/*incidents*.ipynb")) for line in code_of_page(page.relative_to(ROOT))
    )
    for name in incidents():
        own = f'incidents()["{name}"].broken, incidents()["{name}"].fixed' in code
        assert own or f'verdict("{name}"' in code, name
        assert f'show_cause("{name}")' in code, name


@pytest.mark.parametrize("name", EFFECTS)
def test_the_effect_has_the_reported_shape_and_the_fix_takes_it_away(name, ran):
    broken, fixed, ran = incidents()[name].broken, incidents()[name].fixed, ran[name]
    least, most = broken.REPORTED
    assert least <= broken.effect(ran.broken, ran.one) <= most
    without = fixed.effect(ran.fixed, ran.one)
    assert without == pytest.approx(fixed.EXPECTED, abs=0.1 if name == "tied_apart" else 1e-5)  # a loss has noise
    assert not least <= without <= most


@pytest.mark.parametrize("name", END)
def test_the_fixed_program_equals_one_process_and_the_broken_one_does_not(name, ran):
    ran = ran[name]
    assert max(compared(ran.fixed, ran.one).values()) <= TOLERANCE
    assert (max(compared(ran.broken, ran.one).values()) > TOLERANCE) == (name not in UNSEEN)


def differ(ranks) -> set[str]:
    """Of what must be the same on all ranks: which kinds are not."""
    found = {"replicas that are compared": [{k: v.tolist() for k, v in rank.copies.items()} for rank in ranks]}
    found["the logged norm"] = [rank.norms for rank in ranks]
    return {what for what, of_ranks in found.items() if any(other != of_ranks[0] for other in of_ranks)}


@pytest.mark.parametrize("name", END)
def test_a_net_that_compares_ranks_catches_the_mistake_and_nothing_else(name, ran):
    """Of shards that are drawn, the program itself counts the different ones."""
    nets = ["replicas that are compared"] * (name != "replicas_drawn_apart") + ["the logged norm"]
    assert not differ(ran[name].fixed)
    assert {net for net in nets if net in incidents()[name].net} <= differ(ran[name].broken)


@pytest.mark.parametrize("name", HANG if FULL else HANG[:1])
def test_what_hangs_comes_to_no_numbers_and_without_the_mistake_to_those_of_one_process(name):
    broken, fixed = incidents()[name].broken, incidents()[name].fixed
    assert max(differences(fixed).values()) <= TOLERANCE
    assert max(differences(broken).values()) == float("inf")
    least, most = broken.REPORTED
    assert least <= broken.effect() <= most and fixed.effect() == fixed.EXPECTED


def test_only_where_no_number_comes_a_program_never_ends():
    """A tensor of another shape is as far off, and is named."""
    said = [in_words({"loss": loss, "bias": bias}) for loss in (0.0, math.inf) for bias in (0.0, math.inf)]
    assert ["loss" in words for words in said] == [False, False, True, False]
    assert ["bias" in words for words in said] == [False, True, False, False] and len({*said}) == 4


@pytest.mark.parametrize("name", incidents())
def test_the_mistake_is_one_place_and_the_rest_of_the_file_is_the_same(name):
    found = incidents()[name]
    wrong = [line for line in found.source.splitlines() if line.endswith("# wrong")]
    assert len(wrong) == 1 and found.source.count("# right: ") == 1
    shown = found.mistake.splitlines()
    assert sum(line.startswith("-") for line in shown) == sum(line.startswith("+") for line in shown) == 1
