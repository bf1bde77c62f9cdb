"""The museum of incidents: each mistake has the effect that was reported, and without it all equals one process."""

import pytest
from helpers import FULL, code_of_page

from course.fsdp.museum import TOLERANCE, differences, incidents

# The page shows each number of both, and `make test` compares its outputs; here are two, and with FULL=1 all.
SOME = incidents() if FULL else ["leaking_documents", "norm_counts_replicas"]
UNSEEN = ("growing_index",)  # every number is right: only the memory is not


def test_the_page_compares_every_incident_with_one_process():
    code = "\n".join(code_of_page("06_fsdp/09_incidents.ipynb"))
    for name in incidents():
        assert f'incidents()["{name}"].broken, incidents()["{name}"].fixed' in code, name
    assert code.count("worst(broken)") >= len(incidents()) - 1 and code.count("worst(fixed)") == len(incidents())


@pytest.mark.parametrize("name", SOME)
def test_the_effect_has_the_reported_shape_and_the_fix_takes_it_away(name):
    broken, fixed = incidents()[name].broken, incidents()[name].fixed
    least, most = broken.REPORTED
    assert least <= broken.effect() <= most
    without = fixed.effect()
    assert without == pytest.approx(fixed.EXPECTED, abs=0.1 if name == "tied_apart" else 1e-5)  # a loss has noise
    assert not least <= without <= most


@pytest.mark.parametrize("name", SOME)
def test_the_fixed_program_equals_one_process_and_the_broken_one_does_not(name):
    assert max(differences(incidents()[name].fixed).values()) <= TOLERANCE
    assert (max(differences(incidents()[name].broken).values()) > TOLERANCE) == (name not in UNSEEN)


@pytest.mark.parametrize("name", incidents())
def test_the_mistake_is_one_place_and_the_rest_of_the_file_is_the_same(name):
    found = incidents()[name]
    wrong = [line for line in found.source.splitlines() if line.endswith("# wrong")]
    assert len(wrong) == 1 and found.source.count("# right: ") == 1
    shown = found.mistake.splitlines()
    assert sum(line.startswith("-") for line in shown) == sum(line.startswith("+") for line in shown) == 1
