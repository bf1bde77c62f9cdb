"""The sliders of chapter 05 redraw the picture, and say why where they cannot; its flipbook says who waits for what."""

import pytest

from course.pipeline import lab, pictures, schedules, simulator


@pytest.fixture
def sliders():
    return lab.Lab()


def test_times_are_those_of_a_rank_whatever_its_stages():
    plain, two = lab.run("1f1b", 4, 8), lab.run("interleaved", 4, 8, 2)
    assert plain.makespan == 3 * (8 + 3) and two.makespan == 3 * 8 + 3 * 3 / 2
    assert lab.caption("x", plain) == "x: makespan 33, bubble 27%"


def test_every_slider_redraws(sliders):
    seen = {bytes(sliders.picture.value)}
    assert sliders.text.value == "1f1b: makespan 33, bubble 27%, activations stored: [4, 3, 2, 1]"
    for name, value in [("microbatches", 4), ("ranks", 2), ("forward", 2.0), ("message", 1.0), ("name", "interleaved"),
                        ("stages_per_rank", 4), ("backward_input", 2.0), ("backward_weight", 0.5)]:  # fmt: skip
        sliders.controls[name].value = value
        seen.add(bytes(sliders.picture.value))
    assert len(seen) == 9
    assert all(picture.startswith(b"\x89PNG") for picture in seen)


def test_where_the_sliders_begin_and_end(sliders):
    numbers = {name: control for name, control in sliders.controls.items() if name != "name"}
    found = {name: (c.description, c.min, c.value, c.max) for name, c in numbers.items()}
    assert found == {
        "ranks": ("ranks", 1, 4, 8),
        "microbatches": ("micro-batches", 1, 8, 32),
        "stages_per_rank": ("stages/rank", 1, 2, 4),
        "forward": ("forward", 0.5, 1, 3),
        "backward_input": ("bwd. input", 0.5, 1, 3),
        "backward_weight": ("bwd. weight", 0.5, 1, 3),
        "message": ("message", 0, 0, 3),
    }, "what each slider is, where it ends, and where it begins; only a message may take no time"
    assert list(sliders.controls["name"].options) == list(schedules.SCHEDULES), "every schedule"


def test_every_control_is_shown_once(sliders):
    columns, *_, picture = sliders.children
    assert [control for column in columns.children for control in column.children] == [*sliders.controls.values()]
    assert picture is sliders.picture


def test_the_picture_moves_while_a_slider_is_dragged(sliders):
    late = [name for name, control in sliders.controls.items() if not getattr(control, "continuous_update", True)]
    assert not late, f"these wait until the mouse is let go: {late}"


def test_stages_per_rank_can_be_chosen_where_a_schedule_takes_several(sliders, monkeypatch):
    monkeypatch.setattr(lab.plotting, "pipeline", list)  # titles alone: nothing is drawn
    open_for = []
    for name in schedules.SCHEDULES:
        titles = sliders.draw(name=name, ranks=2, microbatches=4, stages_per_rank=3, forward=1, backward_input=1,
                              backward_weight=1, message=0)  # fmt: skip
        timeline = lab.run(name, 2, 4, schedules.SCHEDULES[name].stages_per_rank or 3)
        assert titles == [lab.caption(name, timeline)], f"{name}: the picture's title"
        open_for += [name] * (not sliders.controls["stages_per_rank"].disabled)
    assert open_for == ["interleaved", "looped-bfs", "interleaved-zb"], "where the slider can be moved"


def test_numbers_that_do_not_fit_are_explained(sliders):
    sliders.controls["name"].value = "dualpipev"
    sliders.controls["microbatches"].value = 7
    assert sliders.text.value == "schedule 'dualpipev' on 4 ranks needs 8 or more micro-batches, not 7"
    assert sliders.picture.layout.display == "none"
    assert sliders.controls["stages_per_rank"].disabled
    sliders.controls["microbatches"].value = 8
    assert sliders.text.value.startswith("dualpipev: makespan ") and sliders.picture.layout.display is None


def test_what_is_shown_has_no_number_that_changes(sliders, monkeypatch):
    shown = []
    monkeypatch.setattr("common.lab.sliders.display", lambda data, metadata, raw: shown.append((data, metadata)))
    sliders.show("what it shows")
    ((data, metadata),) = shown
    assert data.pop("application/vnd.jupyter.widget-view+json")["model_id"] == sliders.model_id
    assert data.keys() == {"text/plain", "image/png"} and sliders.model_id not in data["text/plain"]
    assert metadata["image/png"]["alt"] == "what it shows"


def test_steps_of_a_schedule_say_who_waits_for_which_message():
    timeline = simulator.simulate(schedules.build("1f1b", 2, 2), simulator.Times(2, 1, 1))
    steps = pictures.steps(timeline)
    assert [step.caption for step in steps] == [
        "Time 0: rank 0 begins forward 0.",
        "Time 2: rank 0 begins forward 1, rank 1 begins forward 0.",
        "Time 4: rank 1 begins backward 0.",
        "Time 6: rank 0 begins backward 0, rank 1 begins forward 1.",
        "Time 8: rank 1 begins backward 1.",
        "Time 10: rank 0 begins backward 1.",
    ]
    assert steps[2].words == (
        "rank 0: waits for gradient 0 from rank 1, stores micro-batch 0, 1; rank 1: backward 0, stores micro-batch 0"
    )
    assert steps[3].words == (
        "rank 0: backward 0, with gradient from rank 1, stores micro-batch 0, 1; "
        "rank 1: forward 1, with activations from rank 0, stores micro-batch 1"
    )
    assert steps[5].words.endswith("rank 1: done, stores nothing")
    assert all(step.png.startswith(b"\x89PNG") for step in steps)


def test_groups_of_a_mesh_lie_inside_of_nodes_or_between_them():
    axes = {"pipeline": 2, "data": 2, "tensor": 2}  # the last one varies fastest, as for init_device_mesh
    groups = {axis: pictures.groups_on_nodes(axes, axis, gpus_per_node=4)[1] for axis in axes}
    assert groups == {
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    figure, _ = pictures.groups_on_nodes(axes, "pipeline", gpus_per_node=4)
    assert "rank 6\npipeline 1\ndata 1\ntensor 0" in [text.get_text() for text in figure.axes[0].texts]
    neighbours = pictures.groups_on_nodes(axes, "tensor", gpus_per_node=4)[0].axes[0].lines
    assert [len(line.get_xdata()) for line in neighbours] == [2] * 4, "neighbours are joined by a straight line"
