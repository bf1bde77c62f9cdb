from matplotlib.figure import Figure
from matplotlib.patches import Rectangle  # noqa: F401  # plt.Rectangle

rcParams: dict = {}


def cycler(**_values):
    return None


def close(_figure=None):
    pass


class Grid(list):
    """Axes in rows."""

    @property
    def flat(self):
        return [ax for row in self for ax in row]


def subplots(rows=1, columns=1, *, figsize, width_ratios=None, sharex=False, sharey=False, squeeze=True):
    figure = Figure(rows, columns, figsize, width_ratios, sharey)
    axes = Grid(figure.grid)
    if not squeeze:
        return figure, axes
    if rows == columns == 1:
        return figure, axes[0][0]
    return figure, axes[0] if rows == 1 else axes.flat
