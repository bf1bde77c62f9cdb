"""A curve drawn with letters, for a terminal."""


def drawn(values: list[float], width: int = 60, height: int = 8) -> str:
    """Lines of text with the values from left to right, each column the mean of its share of them, between the smallest
    and the largest column, whose values stand at the left. Empty where there are no values."""
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [len(values) * column // width for column in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means), max(means)
    rows = [round((high - mean) / (high - low or 1) * (height - 1)) for mean in means]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    return "\n".join(
        f"{labels.get(row, ''):>8} |{''.join('*' if place == row else ' ' for place in rows)}".rstrip()
        for row in range(height)
    )
