"""A table of text for a terminal."""


def aligned(rows: list[list[str]]) -> list[str]:
    """A line for each row, with two spaces between columns that are each as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
