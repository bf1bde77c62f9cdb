"""Pictures of memory over a step, and the calculator of "Where the memory is": what the planner says of one layout as
bars, with sliders."""

from dataclasses import replace
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt

from common.constants import GIB
from common.errors import UserError
from common.lab import plotting
from common.lab.sliders import Sliders
from planner import hardware, models, time
from planner.estimate import Estimate, estimate
from planner.layout import RECOMPUTE, make_layout

# The planner's parts of memory, in six groups that a bar can show.
GROUPS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "gathered units": ("gathered", "unsharded gradients", "16-bit copies", "buckets of gradients"),
    "activations": ("activations", "a layer computed again", "gradients of activations", "gathered activations",
                    "messages"),
    "logits and loss": ("logits and loss",),
}  # fmt: skip
COLOURS = dict(zip(GROUPS, plotting.PALETTE, strict=False))
WORK: dict[str, Any] = {"fc": "#999999", "ec": "white"}
OPTIMIZER: dict[str, Any] = {"fc": "white", "ec": "#999999", "hatch": "xx"}
HIDDEN: dict[str, Any] = {"fc": plotting.YELLOW, "ec": "white"}
EXPOSED: dict[str, Any] = {"fc": plotting.BLACK, "ec": "white", "hatch": "//"}
MODELS = ("llama-3.2-1b", "llama-7b", "llama-13b", "llama-33b", "llama-2-70b", "llama-3-405b")
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3 (FSDP)": 3}


def ask(model: str, gpus: int, stage: int, *, gpu="h100-80gb", micro_batch=1, accumulation=1, sequence=4096,
        **fields) -> Estimate:  # fmt: skip
    """The planner's estimate of data parallelism in one of its stages, over all GPUs. `fields` are those of Layout,
    such as precision, recompute and offload. Raises UserError."""
    shape, cluster = models.find(model), hardware.cluster(gpu, gpus)
    fields.setdefault("framework", "torch")
    mesh = {"shard" if stage else "data": gpus}
    batch = gpus * micro_batch * accumulation
    layout = make_layout(shape, cluster, mesh, batch_size=batch, micro_batch=micro_batch, sequence=sequence,
                         zero_stage=stage, **fields)  # fmt: skip
    return estimate(shape, cluster, layout)


def grouped(found: Estimate) -> dict[str, float]:
    """GiB at the peak, in the groups of GROUPS; what the allocator adds or saves is not among them."""
    return {name: sum(found.memory.parts.get(part, 0.0) for part in parts) / GIB for name, parts in GROUPS.items()}


def messages(found: Estimate) -> tuple[float, float]:
    """Seconds of messages in a step: (hidden behind work, exposed). All of them are what the planner says is exposed if
    no share of a message can be hidden."""
    nothing = replace(found.constants, kept=0.0, async_kept=0.0)
    every = time.estimate(found.model, found.cluster, found.layout, nothing).exposed
    return max(0.0, every - found.step.exposed), found.step.exposed


def draw(rows: dict[str, Estimate]):
    """For each layout what a GPU's memory holds at the peak of a step, beside what it has, and where a step's time
    goes: work on top, communication below it, hidden where it lies under the work."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 1.9 + 0.62 * len(rows)), width_ratios=[3, 2], sharey=True)
    limit = next(iter(rows.values())).cluster.gpu.memory / GIB
    widest = 1.15 * max(limit, *(sum(grouped(found).values()) for found in rows.values()))
    for row, found in enumerate(rows.values()):
        end = 0.0
        for name, size in grouped(found).items():
            left.barh(row, size, 0.7, end, color=COLOURS[name], ec="white", lw=0.5)
            if size > 0.05 * widest:
                ink = "black" if name in ("optimizer", "activations", "gradients", "gathered units") else "white"
                ground = {"fc": COLOURS[name], "ec": "none", "pad": 1}  # the limit's line stays behind the number
                left.text(end + size / 2, row, f"{size:.0f}", ha="center", va="center", size=11, color=ink,
                          bbox=ground, zorder=5)  # fmt: skip
            end += size
        left.text(end + 0.01 * widest, row, f"{end:.0f}", va="center", weight="bold")
        hidden, exposed = messages(found)
        optimizer = found.step.parts["optimizer"]
        work = found.seconds - exposed - optimizer
        right.barh(row - 0.18, work, 0.34, **WORK)
        right.barh(row - 0.18, optimizer, 0.34, work + exposed, **OPTIMIZER)
        right.barh(row + 0.18, hidden, 0.34, work - hidden, **HIDDEN)
        right.barh(row + 0.18, exposed, 0.34, work, **EXPOSED)
        right.text(found.seconds, row, f" {found.seconds:.2f} s", va="center")
    left.plot([limit, limit], [-0.5, len(rows)], color="black", ls="--", lw=1.5)
    left.text(limit, -0.55, f"{limit:.0f} GiB that a GPU has", ha="center", va="bottom", size=11)
    left.set(xlim=(0, widest), yticks=range(len(rows)), xlabel="memory at the peak (GiB per GPU)")
    left.set_yticklabels(rows, fontsize=11)
    left.set_ylim(len(rows) - 0.4, -0.6)
    right.set(xlabel="one step (seconds)", xlim=(0, 1.22 * max(found.seconds for found in rows.values())))
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    left.legend(handles, COLOURS, loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=3, fontsize=11)
    handles = [plt.Rectangle((0, 0), 1, 1, **kind) for kind in (WORK, OPTIMIZER, HIDDEN, EXPOSED)]
    names = ["forward, backward", "optimizer", "hidden communication", "exposed communication"]
    right.legend(handles, names, loc="lower center", bbox_to_anchor=(0.45, 1.1), ncols=2, fontsize=11)
    return fig


class Calculator(Sliders):
    """Controls, what follows from them in a line of text, and their picture."""

    def __init__(self):
        self.text = widgets.Label()
        controls = {
            "model": widgets.Dropdown(options=MODELS, value="llama-7b", description="model"),
            "gpus": self.choice("GPUs", [2**k for k in range(11)], 8),
            "stage": widgets.Dropdown(options=STAGES, value=3, description="stage"),
            "precision": widgets.Dropdown(
                options=["float32", "bf16-mixed", "fp16-mixed", "bf16"], value="bf16-mixed", description="precision"
            ),
            "sequence": self.choice("sequence", [512 * 2**k for k in range(8)], 4096),
            "micro_batch": self.choice("micro-batch", [1, 2, 4, 8, 16, 32], 1),
            "recompute": widgets.Dropdown(
                options=[how for how in RECOMPUTE if how != "selective"], value="none", description="recompute"
            ),
            "offload": widgets.Checkbox(False, description="offload"),
        }
        super().__init__(controls, self.text)

    @staticmethod
    def choice(what, options, value):
        return widgets.SelectionSlider(options=options, value=value, description=what, continuous_update=False)

    def draw(self, model, gpus, stage, **fields):
        try:
            found = ask(model, gpus, stage, **fields)
        except UserError as error:
            self.text.value = str(error)
            return None
        memory, step = found.memory, found.step
        self.text.value = (
            f"{memory.low / GIB:.0f} to {memory.high / GIB:.0f} GiB with what the allocator adds: fits: {found.fits}; "
            f"step {found.seconds:.2f} s, of which {step.exposed:.2f} s exposed communication; MFU {found.mfu:.0%}"
        )
        return draw({f"{model}\n{gpus} GPU{'s' * (gpus > 1)}": found})
