"""A picture of a plan: memory and time of each layout, by what they go into."""

from planner.estimate import GIB, Estimate


def picture(found: list[Estimate], path: str) -> None:
    """Write a picture of these layouts: on the left what memory is for, on the right what time goes into."""
    import matplotlib.pyplot as plt

    from common.lab.plotting import PALETTE

    fig, (left, right) = plt.subplots(1, 2, figsize=(13, 1.6 + 0.7 * len(found)), layout="constrained")
    labels = [f"{number}. {one.layout.describe()}" for number, one in enumerate(found, 1)]
    memory = [{name: size / GIB for name, size in one.memory.parts.items()} for one in found]
    sides = (
        (left, memory, "memory (GiB)", "{:.0f}"),
        (right, [one.step.parts for one in found], "step (seconds)", "{:.2f}"),
    )
    for ax, parts, title, form in sides:
        names = list(dict.fromkeys(name for one in parts for name in one))
        ends = [0.0] * len(found)
        for number, name in enumerate(names):
            sizes = [one.get(name, 0.0) for one in parts]
            ax.barh(range(len(found)), sizes, left=ends, label=name, color=PALETTE[number % len(PALETTE)],
                    hatch="//" if number >= len(PALETTE) else None)  # fmt: skip
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for row, end in enumerate(ends):
            ax.text(end, row, " " + form.format(end), va="center")
        ax.set(xlabel=title, yticks=range(len(found)), xlim=(0, 1.15 * max(ends)))
        ax.set_yticklabels(labels if ax is left else [])
        ax.invert_yaxis()
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18 - 0.02 * len(found)), ncols=3)
    left.axvline(found[0].cluster.gpu.memory / GIB, color="black", linestyle="--")
    fig.suptitle(f"{found[0].model.name} on {found[0].cluster.gpus} x {found[0].cluster.gpu.name}")
    fig.savefig(path, dpi=110)
    plt.close(fig)


