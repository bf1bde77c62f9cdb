"""Pictures of the notebook on experts: gates, capacity, tokens that travel, loads, and what an exchange takes."""

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch, Rectangle

from common.lab import plotting
from course.model_parallel.context_pictures import GREY


def draw_gates(gates):
    """A column for each token and a row for each expert, with the gates as numbers. gates: [tokens, experts]"""
    tokens, experts = gates.shape
    fig, ax = plt.subplots(figsize=(0.58 * tokens + 1.2, 0.36 * experts + 0.9))
    for token, expert in gates.nonzero().tolist():
        gate = float(gates[token, expert])
        ax.add_patch(Rectangle((token, expert), 1, 1, fc=plotting.BLUE, alpha=0.15 + 0.85 * gate, ec="white"))
        ink = "white" if gate > 0.45 else "black"
        ax.text(token + 0.5, expert + 0.5, f"{gate:.2f}", ha="center", va="center", color=ink, size=11)
    ax.set(xlim=(0, tokens), ylim=(experts, 0), xlabel="token", ylabel="expert")
    ax.set_xticks([token + 0.5 for token in range(tokens)], range(tokens), fontsize=11)
    ax.set_yticks([expert + 0.5 for expert in range(experts)], range(experts), fontsize=11)
    ax.tick_params(length=0)
    ax.spines[:].set_color(GREY)
    return fig


def draw_capacity(choices, capacity, factor):
    """How many tokens chose each expert, of which those beyond the capacity are dropped. choices: [experts]"""
    fig, ax = plt.subplots(figsize=(7.6, 3.2))
    experts, taken = range(len(choices)), [min(count, capacity) for count in choices]
    ax.bar(experts, taken, color=plotting.BLUE)
    for expert, count in enumerate(choices):
        if count > capacity:
            ax.bar(expert, count - capacity, bottom=capacity, fc="white", ec=plotting.VERMILION, hatch="//")
            label = f"{count - capacity} dropped"
            ax.text(expert, count + 0.15, label, ha="center", color=plotting.VERMILION, size=11)
    ax.axhline(capacity, color=plotting.BLACK, ls="--", lw=1.5)
    ax.text(len(choices) - 0.45, capacity, f" capacity {capacity}", va="bottom", size=11)
    ax.set(xlabel="expert", ylabel="tokens that chose it", ylim=(0, 9.2), xlim=(-0.6, len(choices) + 0.9))
    ax.set_xticks(experts)
    ax.set_title(f"capacity factor {factor}", fontsize=12)
    return fig


def draw_tokens(before, after, titles):
    """Tokens before and after a step, with an arrow for each.

    before, after: for each rank, the list of (name of the token, its expert) in the order in which they lie there
    titles:        one for each side

    A token has the colour of the rank of its expert: of experts 0 and 1 that is rank 0, and so on.
    """
    size = len(before)
    tallest = max(sum(map(len, side)) for side in (before, after)) + size
    fig, ax = plt.subplots(figsize=(7.4, 0.27 * tallest + 0.6))
    ends = []
    for x, side, title in zip((0, 4.6), (before, after), titles, strict=True):
        place, y = {}, 0.0
        ax.text(x + 1.0, -0.35, title, ha="center", va="bottom")
        for rank, tokens in enumerate(side):
            middle, where = y + max(len(tokens), 1) / 2, -0.15 if x == 0 else 2.15
            ax.text(x + where, middle, f"rank {rank}", ha="right" if x == 0 else "left", va="center", weight="bold")
            for name, expert in tokens:
                colour, label = plotting.PALETTE[expert // 2], f"{name}, expert {expert}"
                ink = "white" if colour == plotting.BLUE else "black"
                ax.add_patch(Rectangle((x, y), 2.0, 0.9, color=colour, lw=0))
                ax.text(x + 1.0, y + 0.46, label, ha="center", va="center", color=ink, size=10.5)
                place[name] = y + 0.45
                y += 1
            y += 0.8 if tokens else 1.8
        ends.append(place)
    for name, y in ends[0].items():
        look = {"arrowstyle": "-|>", "mutation_scale": 10, "lw": 1.2, "color": "#555555", "shrinkA": 0, "shrinkB": 0}
        ax.add_patch(FancyArrowPatch((2.05, y), (4.55, ends[1][name]), **look))
    ax.set(xlim=(-1.1, 7.7), ylim=(tallest + 0.2, -1.3))
    ax.set_axis_off()
    return fig


def draw_loads(runs, experts):
    """The experts' shares over the steps of some trainings, on one scale. runs: title -> shares [steps, experts]"""
    fig, axes = plt.subplots(1, len(runs), figsize=(9.8, 3.0), sharey=True)
    for ax, (title, shares) in zip(axes, runs.items(), strict=True):
        smooth = 100 * shares.unfold(0, 10, 1).mean(dim=-1)  # means of ten steps
        order = smooth[-1].argsort(descending=True)
        for rank, expert in enumerate(order.tolist()):
            colour = plotting.VERMILION if rank == 0 else "#888888"
            ax.plot(range(10, len(shares) + 1), smooth[:, expert], lw=2 if rank == 0 else 1, color=colour)
        ax.axhline(100 / experts, color=plotting.BLACK, ls=":", lw=1.5)
        ax.set_title(title, fontsize=12)
        ax.set(xlabel="step", ylim=(0, 58))
    axes[0].set_ylabel("share of the choices (%)")
    where = {"ha": "right", "va": "bottom", "size": 10}
    axes[0].text(len(shares), 100 / experts + 0.5, "even share", **where)
    axes[0].text(len(shares), 51.5, "favourite at the end", color=plotting.VERMILION, **where)
    return fig


def draw_dropped(factors, dropped):
    """Share of dropped choices over the capacity factor. dropped: name -> shares, the larger ones first"""
    fig, ax = plt.subplots(figsize=(8, 3.5))
    places = [(factors[2] + 0.1, 100 * max(values[2] for values in dropped.values())), (factors[0] - 0.05, 4)]
    for (name, values), style, place in zip(dropped.items(), ("o--", "s-"), places, strict=True):
        ax.plot(factors, [100 * value for value in values], style)
        ax.text(*place, name, color=ax.lines[-1].get_color(), size=12)
    ax.set(xlabel="capacity factor (capacity / even share)", ylabel="choices dropped (%)", ylim=(0, None))
    return fig


def draw_exchange_times(layers):
    """Bars of microseconds per token, one group for each model. layers: model -> {what: seconds}"""
    fig, ax = plt.subplots(figsize=(8.8, 3.2))
    ticks = []
    for group, (model, times) in enumerate(layers.items()):
        for number, (what, seconds) in enumerate(times.items()):
            y = 4 * group + number
            ax.barh(y, 1e6 * seconds, 0.85, color=plotting.PALETTE[number])
            ax.text(1e6 * seconds, y, f" {what}: {1e6 * seconds:.2f} µs", va="center", size=11)
        ticks.append((4 * group + 1, model))
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.invert_yaxis()
    ax.set(xlabel="µs per token and layer, forward")
    ax.set_xlim(0, 1.6e6 * max(max(times.values()) for times in layers.values()))
    return fig


def shares(counts):
    """Counts [..., experts] as shares of their sum."""
    counts = torch.as_tensor(counts, dtype=torch.float32)
    return counts / counts.sum(-1, keepdim=True)
