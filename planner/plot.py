"""A picture of a plan: memory and time of each layout, by what they go into."""

from common.constants import GIB
from planner.estimate import Estimate


def picture(found: list[Estimate], path: str) -> None:
    """Write a picture of these layouts: above what memory is for, below what time goes into."""
    import matplotlib.pyplot as plt

    from common.lab.plotting import PALETTE

    fig, axes = plt.subplots(2, 1, figsize=(13, 3 + 1.1 * len(found)), layout="constrained")
    labels = [f"{number}. {one.layout.describe()}" for number, one in enumerate(found, 1)]
    memory = [{name: size / GIB for name, size in one.memory.parts.items()} for one in found]
    limit = found[0].cluster.gpu.memory / GIB
    times = [one.step.parts for one in found]
    sides = ((memory, "memory per GPU (GiB)", "{:.0f}"), (times, "step (seconds)", "{:.2f}"))
    for ax, (parts, title, form) in zip(axes, sides, strict=True):
        names = list(dict.fromkeys(name for one in parts for name in one))
        ends = [0.0] * len(found)
        for number, name in enumerate(names):
            sizes = [one.get(name, 0.0) for one in parts]
            ax.barh(range(len(found)), sizes, left=ends, label=name, color=PALETTE[number % len(PALETTE)],
                    hatch="//" if number >= len(PALETTE) else None)  # fmt: skip
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for row, end in enumerate(ends):
            ax.text(end, row, " " + form.format(end), va="center")
        most = max([*ends, limit] if parts is memory else ends)
        ax.set(xlabel=title, yticks=range(len(found)), xlim=(0, 1.1 * most))
        ax.set_yticklabels(labels, fontsize=9)
        ax.invert_yaxis()
        ax.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[0].axvline(limit, color="black", linestyle="--")
    axes[0].text(limit, -0.6, f" {limit:.0f} GiB", va="bottom")
    fig.suptitle(f"{found[0].model.name} on {found[0].cluster.gpus} x {found[0].cluster.gpu.name}")
    fig.savefig(path, dpi=110)
    plt.close(fig)
