"""Pictures of meshes: ranks stand where their numbers say, and messages go the way that the caption says."""

import itertools

import matplotlib.pyplot as plt

from course.fsdp.axes_pictures import PLACES, eight_ranks, groups_of_first, pairs


def test_ranks_are_numbered_as_the_mesh_numbers_them():
    """The last axis varies fastest: pipeline, data, tensor."""
    fig = eight_ranks(None, [], [], "nothing")
    shown = {text.get_position(): text.get_text() for text in fig.axes[0].texts}
    for number, place in enumerate(itertools.product((0, 1), repeat=3)):
        assert shown[PLACES[place]] == f"rank {number}", f"at {place}"
    plt.close(fig)


def test_groups_are_those_of_the_mesh_whose_first_axis_is_innermost():
    assert groups_of_first({"tensor": 8, "data": 6, "pipeline": 64})["pipeline"][:3] == [0, 48, 96]
    assert groups_of_first({"tensor": 2, "data": 3}) == {"tensor": [0, 1], "data": [0, 2, 4]}


def test_pairs_differ_along_their_axis_alone():
    for number, axis in enumerate(("pipeline", "data", "tensor")):
        for start, end in pairs(axis, [*PLACES]):
            assert [a != b for a, b in zip(start, end, strict=True)] == [number == place for place in range(3)], axis
