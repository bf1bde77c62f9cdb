"""Pictures of what a step computes and sends, simulated and recorded, and of ranks that wait for a late one."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import plotting, recordings

RECORDED = {"V100, naive": "trace_naive_ddp_2xv100", "A100, DDP": "trace_ddp_resnet50_2xa100"}
STEP = "ProfilerStep#5"  # of the A100's recording, which has three steps
ALL_REDUCE = {"all_reduce": "all-reduce", "allreduce": "all-reduce"}  # as each of the two names it


def draw_race(steps: dict):
    """number of GPUs -> (seconds of the forward pass, of the backward pass, the buckets as `buckets.simulate` has sent
    them): what is computed and what is sent, on one time axis."""
    colours = {"forward pass": plotting.SKY, "backward pass": plotting.BLUE, "all-reduce": plotting.ORANGE}
    bars = []
    for ranks, (forward, backward, sent) in steps.items():
        computes, sends = f"{ranks} GPUs compute", f"{ranks} GPUs send"
        bars += [(computes, "forward pass", 0, forward), (computes, "backward pass", forward, forward + backward)]
        bars += [(sends, "all-reduce", forward + bucket.start, forward + bucket.end) for bucket in sent]
    return plotting.timeline(bars, colours=colours)


def recorded_steps(join_us: float = 0.0) -> dict:
    """name -> the events of one step on one GPU, of both recordings. join_us: as for `recordings.events`."""

    def kind(row):
        return ALL_REDUCE.get(recordings.kind(row), recordings.kind(row))

    found = {}
    for name, source in RECORDED.items():
        rows = recordings.read(source)
        between = recordings.stretch(rows, STEP) if name == "A100, DDP" else None
        found[name] = recordings.events(rows, between=between, kind=kind, join_us=join_us)
    return found


def draw_recorded_steps():
    """What each GPU computes and reduces. Gaps below 0.2 ms are closed, since thousands of kernels can't be seen."""
    colours, bars = {"compute": plotting.BLUE, "all-reduce": plotting.ORANGE}, []
    for name, events in recorded_steps(join_us=200).items():
        first = min(start for _, _, start, _ in events)
        bars += [(f"{name}: {what}", what, start - first, end - first)
                 for _, what, start, end in events if what in colours]  # fmt: skip
    return plotting.timeline(bars, colours=colours)


def print_shares() -> None:
    """Of each recorded step: its all-reduces, which share of their time is hidden, and what else the GPU does."""
    print("                  all-reduces   hidden    computes        idle        step   first to last all-reduce")
    for name, events in recorded_steps().items():
        totals, spans = recordings.totals(events), recordings.spans(events)
        sent = recordings.spans(events, "all-reduce")
        whole, region = (max(end for _, end in all_) - min(start for start, _ in all_) for all_ in (spans, sent))
        count, reduces = totals["all-reduce"]
        share = recordings.hidden(events, "all-reduce", under="compute")
        print(f"{name:12}  {count:4} in {1e3 * reduces:5.1f} ms {share:8.0%}", end="")
        for seconds in (totals["compute"][1], whole - recordings.length(spans), whole):
            print(f"{1e3 * seconds:9.1f} ms", end="")
        print(f" {1e3 * region:23.1f} ms")


def draw_shares(dealt: dict, size: int):
    """title -> the examples of each rank, out of `size`, as cards: a panel for each title, a row for each rank. Cards
    that repeat an example are orange; under the panel stands what nobody has."""
    fig, axes = plt.subplots(1, len(dealt), figsize=(9.5, 2.9), sharey=True)
    longest = max(len(share) for shares in dealt.values() for share in shares)
    for ax, (title, shares) in zip(axes, dealt.items(), strict=True):
        seen: set[int] = set()
        for turn in range(longest):  # the order in which they are dealt out
            for rank, share in enumerate(shares):
                if turn < len(share):
                    repeated = share[turn] in seen
                    seen.add(share[turn])
                    colour = plotting.ORANGE if repeated else plotting.SKY
                    ax.add_patch(Rectangle((turn + 0.06, rank + 0.08), 0.88, 0.84, fc=colour, lw=0))
                    ax.text(turn + 0.5, rank + 0.5, share[turn], ha="center", va="center", fontsize=13)
        unread = sorted({*range(size)} - seen)
        twice = sum(map(len, shares)) - len(seen)
        note = f"{twice} come twice" if twice else f"left out: {', '.join(map(str, unread))}"
        ax.set_title(title, fontsize=13, family="monospace" if "=" in title else None)
        ax.set(xlim=(0, longest), ylim=(len(shares), 0), xticks=[])
        ax.set_xlabel(note, fontsize=13)
        ax.set_yticks([rank + 0.5 for rank in range(len(shares))], [f"rank {r}" for r in range(len(shares))], size=12)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return fig


def draw_late(panels: dict):
    """title -> for each rank (start, end of its work, end of the all-reduce) of each step, in seconds: a panel for
    each title, on one time axis."""
    fig, axes = plt.subplots(len(panels), 1, figsize=(9.5, 2.1 * len(panels) + 0.7), sharex=True)
    for ax, (title, ranks) in zip(axes, panels.items(), strict=True):
        origin = min(steps[0][0] for steps in ranks)
        for rank, steps in enumerate(ranks):
            for start, middle, end in steps:
                for left, right, colour in ((start, middle, plotting.SKY), (middle, end, plotting.ORANGE)):
                    place = [((left - origin) * 1e3, (right - left) * 1e3)]
                    ax.broken_barh(place, (rank - 0.4, 0.8), fc=colour, ec="white", lw=0.6)
        ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=11)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=13)
    axes[-1].set_xlabel("time (ms)")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (plotting.SKY, plotting.ORANGE)]
    fig.legend(handles, ["works (sleeps)", "in the all-reduce"], loc="outside lower center", ncols=2, fontsize=12)
    return fig
