"""Pictures of what a step computes and sends, simulated and recorded, and of ranks that wait for a late one."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import plotting, recordings
from course.ddp.buckets import EXPOSED

RECORDED = {"V100, naive": "trace_naive_ddp_2xv100", "A100, DDP": "trace_ddp_resnet50_2xa100"}
STEP = "ProfilerStep#5"  # of the A100's recording, which has three steps
ALL_REDUCE = {"all_reduce": "all-reduce", "allreduce": "all-reduce"}  # as each of the two names it


def draw_passes(runs: dict):
    """name -> what a rank does when, as (what, begin, end) in milliseconds: one row for computing, one for sending."""
    bars = [
        (f"{name}: {what.partition(',')[0]}", what, begin / 1e3, end / 1e3)
        for name, run in runs.items()
        for what, begin, end in run
    ]
    colours = {"computes": plotting.BLUE, "sends, hidden": plotting.ORANGE, "sends, exposed": plotting.VERMILION}
    return plotting.timeline(bars, colours=colours)


def draw_race(steps: dict):
    """number of GPUs -> (seconds of the forward pass, of the backward pass, the buckets as `buckets.simulate` has sent
    them): what is computed and what is sent, on one time axis. What is exposed is hatched."""
    fig, ax = plt.subplots(figsize=(9.5, 1.15 * len(steps) + 0.8))
    longest = max(1e3 * max(forward + backward, forward + sent[-1].end) for forward, backward, sent in steps.values())
    for place, (forward, backward, sent) in enumerate(steps.values()):
        computes, sends = (2.6 * place, 0.95), (2.6 * place + 1, 0.95)
        stop = 1e3 * (forward + backward)
        for name, start, end, colour in (("forward pass", 0, 1e3 * forward, plotting.SKY),
                                         ("backward pass", 1e3 * forward, stop, plotting.BLUE)):  # fmt: skip
            ax.broken_barh([(start, end - start)], computes, fc=colour, ec="white", lw=0.6)
            if place == 0:
                ink = "white" if colour == plotting.BLUE else "black"
                ax.text((start + end) / 2, 0.48, name, ha="center", va="center", size=13, color=ink)
        for bucket in sent:
            start, end = (1e3 * (forward + moment) for moment in (bucket.start, bucket.end))
            hidden = max(0.0, min(end, stop) - start)
            ax.broken_barh([(start, hidden)], sends, fc=plotting.ORANGE, ec="white", lw=0.6)
            if end > stop:
                ax.broken_barh([(start + hidden, end - start - hidden)], sends, **(EXPOSED | {"lw": 0.6}))
        end, total = 1e3 * (forward + sent[-1].end), 1e3 * sum(bucket.end - bucket.start for bucket in sent)
        note = f"{total:.0f} ms of all-reduces,\n{max(0.0, end - stop):.0f} exposed"
        ax.text(max(end, stop) + longest / 75, 2.6 * place + 1.47, note, va="center", size=12, color=plotting.VERMILION)
    ax.set_yticks([2.6 * place + 0.97 for place in range(len(steps))], [f"{ranks} GPUs" for ranks in steps])
    ax.set(ylim=(2.6 * len(steps) - 0.5, -0.2), xlim=(0, 1.31 * longest), xlabel="time (ms)")
    ax.tick_params(axis="y", length=0)
    return fig


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
    """What each GPU computes and reduces, each on a time axis of its own, and what the A100's host does. Gaps below
    0.2 ms are closed, since thousands of kernels can't be seen."""
    fig, axes = plt.subplots(len(RECORDED), 1, figsize=(9.5, 4.6), height_ratios=[2, 3])
    for ax, (name, events) in zip(axes, recorded_steps(join_us=200).items(), strict=True):
        origin = min(start for _, _, start, _ in events)
        if name == "A100, DDP":
            rows = recordings.read(RECORDED[name])
            origin, stop = (moment / 1e6 for moment in recordings.stretch(rows, STEP))
            for host in ("forward", "backward", "optimizer"):
                begun, ended = next(span for row in rows for span in [recordings.stretch([row], row["name"])]
                                    if row["name"] == host and origin <= span[0] / 1e6 < stop)  # fmt: skip
                left, right = (1e3 * (moment / 1e6 - origin) for moment in (begun, ended))
                ax.broken_barh([(left, right - left)], (-1.05, 0.7), fc="#DDDDDD", ec="white", lw=1.5)
                outside = host == "optimizer"  # too short for its name
                place, side = (right + 2, "left") if outside else ((left + right) / 2, "center")
                ax.text(place, -0.7, host, ha=side, va="center", size=12)
        for place, (what, colour) in enumerate((("compute", plotting.BLUE), ("all-reduce", plotting.ORANGE))):
            spans = [(1e3 * (start - origin), 1e3 * (end - start)) for _, kind, start, end in events if kind == what]
            ax.broken_barh(spans, (place, 0.85), fc=colour, lw=0)
        host = name == "A100, DDP"
        ax.set_yticks([-0.7] * host + [0.42, 1.42], ["host"] * host + ["GPU computes", "all-reduces"])
        ax.tick_params(axis="y", length=0)
        ax.set(ylim=(1.95, -1.15 if host else -0.1), xlim=(0, 250 if host else 375))
        ax.set_title(name, loc="left", fontsize=13)
    axes[-1].set_xlabel("time (ms)")
    return fig


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
    rows = recordings.read(RECORDED["A100, DDP"])
    begun, ended = recordings.stretch(rows, STEP)
    steps = [recordings.stretch(rows, str(row["name"])) for row in rows if str(row["name"]).startswith("ProfilerStep")]
    took = [recordings.totals(recordings.events(rows, between=step))["allreduce"][1] for step in steps]
    print("A100: the all-reduces of three steps take   ", ", ".join(f"{1e3 * seconds:5.1f}" for seconds in took), "ms")
    for what, name in (("A100: the host calls the all-reduces at", "nccl:all_reduce"),
                       ("      their kernels begin at", "ncclKernel_AllReduce_RING_LL_Sum_float")):  # fmt: skip
        starts = [recordings.stretch([row], name)[0] for row in rows if str(row["name"]).startswith(name)]
        print(f"{what:41}" + ", ".join(f"{(at - begun) / 1e3:6.2f}" for at in starts if begun <= at < ended), "ms")


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
