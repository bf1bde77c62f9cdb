"""The museum of incidents: each mistake has the effect that was reported, and without it all equals one process."""

import pytest

from course.fsdp.museum import TOLERANCE, differences, incidents

UNSEEN = ("growing_index",)  # every number is right: only the memory is not


@pytest.mark.parametrize("name", incidents())
def test_the_effect_has_the_reported_shape_and_the_fix_takes_it_away(name):
    broken, fixed = incidents()[name].broken, incidents()[name].fixed
    least, most = broken.REPORTED
    assert least <= broken.effect() <= most
    without = fixed.effect()
    assert without == pytest.approx(fixed.EXPECTED, abs=0.1 if name == "tied_apart" else 1e-5)  # a loss has noise
    assert not least <= without <= most


@pytest.mark.parametrize("name", incidents())
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
