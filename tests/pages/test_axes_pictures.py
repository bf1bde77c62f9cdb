"""Pictures of meshes: ranks stand where their numbers say, and messages go the way that the caption says."""

import itertools

import matplotlib.pyplot as plt

from course.fsdp import axes_pictures
from course.fsdp.axes_pictures import PLACES, eight_ranks, groups_of_first, matrices, owners, pairs, step_frames


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


def test_every_element_of_a_cut_matrix_has_the_ranks_that_hold_it():
    grid = owners((2, 2), [[[0.0, 1.0]], [[2.0], [3.0]], [[1.0]]])
    assert grid == [[[0], [0, 2]], [[1], [1]]]
    fig = matrices({"one": grid, "another": grid})
    assert [text.get_text() for text in fig.axes[0].texts] == ["rank 0", "ranks 0, 2", "rank 1"]
    plt.close(fig)


def test_pairs_differ_along_their_axis_alone():
    for number, axis in enumerate(("pipeline", "data", "tensor")):
        for start, end in pairs(axis, [*PLACES]):
            assert [a != b for a, b in zip(start, end, strict=True)] == [number == place for place in range(3)], axis


def test_activations_go_forward_and_gradients_back(monkeypatch):
    shots = []
    monkeypatch.setattr(axes_pictures, "eight_ranks", lambda *args: shots.append(args))
    step_frames()
    ways = {
        says: {(start[0], end[0]) for start, end in arrows} for axis, arrows, _, says in shots if axis == "pipeline"
    }
    assert ways == {"pipeline: send activations": {(0, 1)}, "pipeline: send gradients of activations": {(1, 0)}}
    for axis, arrows, busy, says in shots:
        wanted = {"first": 0, "second": 1}.get(says.partition(" stage")[0].split()[-1])
        ranks = busy + [end for pair in arrows for end in pair if axis != "pipeline"]
        assert wanted is None or {rank[0] for rank in ranks} == {wanted}, says
        assert all(
            axis == ("pipeline", "data", "tensor")[[a != b for a, b in zip(*pair, strict=True)].index(True)]
            for pair in arrows
        ), says
