"""The curve that a training ends with on a terminal."""

from common.terminal_plot import drawn


def test_a_curve_falls_from_its_largest_to_its_smallest_value():
    lines = drawn([4.0 - k / 100 for k in range(301)], width=20, height=5).splitlines()
    columns = ["".join(line[10 + k : 11 + k] for line in lines).replace(" ", "") for k in range(20)]
    assert columns == ["*"] * 20, "one mark in each column"
    heights = [next(row for row, line in enumerate(lines) if line[10 + k : 11 + k] == "*") for k in range(20)]
    assert heights == sorted(heights) and {heights[0], heights[-1]} == {0, 4}
    assert [float(lines[0].split()[0]), float(lines[-1].split()[0])] == [3.93, 1.07], "means of 15 values each"


def test_few_and_equal_values():
    assert drawn([]) == "" and drawn([2.0, 2.0]).splitlines()[0].endswith("|**")
