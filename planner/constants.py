"""What can be reached of data sheets: the planner's few constants, and where each comes from.

Those marked "fitted" come from `python -m planner scoreboard --refit`, which fits them on all published sources
together. What the scoreboard prints as errors are those of constants fitted without the source that is predicted.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.errors import UserError, writing


@dataclass(frozen=True)
class Constants:
    """Numbers without unit, but for the three times, which are in seconds.

    matmul:      share of a GPU's best measured rate of products that the products of a training reach    (fitted)
    passes:      how often what a layer keeps crosses the memory in a forward pass; twice as often backward (fitted)
    eager:       how much more of it does where no compiler fuses                                            (fitted)
    attention:   factor on the GPU's share of the peak for fused attention                                   (fitted)
    fp8:         how much faster products are in 8 bit, conversions included                                 (fitted)
    link:        share of the links' bandwidth inside a node that a ring reaches (0.78 on A100, 0.82 on H200 without
                 NVLS with the largest messages: stas00/ml-engineering; less with those of a training)   (fitted)
    network:     share of the adapters' bandwidth between nodes                                              (fitted)
    kept:        share of a message that stays hidden while it overlaps with work (Galvatron's profiles: products
                 take 1.126 of their time beside messages)
    memory_rate: share of a data sheet's memory bandwidth that element-wise kernels and optimizers reach
    async_kept:  of a message of asynchronous tensor parallelism, the share that its product hides           (fitted)
    ring:        how much longer attention takes under context parallelism, times 1 - 1/ranks: 0 were all ranks' work
                 equal and steps of the ring as efficient as one product; 1 if the last rank attends to all keys while
                 the first waits. Before it is fitted, the middle of both                                     (fitted)
    kernel:      seconds before a product begins to compute
    alpha_link, alpha_network: seconds per message inside a node (an all-reduce of 14 steps takes 18 microseconds on 8
                 H100, Smol Training Playbook, and 40 on 8 H200, stas00/ml-engineering), and to the next stage
                 between nodes
    alpha_tree:  seconds for each doubling of the nodes of an all-reduce in a tree (65 microseconds on 2 to 16 nodes of
                 H100s with EFA: Smol Training Playbook, small messages)
    tree:        share of a ring's bandwidth that a tree has (the same, 4 to 64 MiB)
    ring_alpha:  factor on the network's seconds for each rank of a ring (planner/networks.csv)      (fitted)
    all_to_all:  share of an adapter's bandwidth that an all-to-all reaches (the same)
    bucket:      bytes of a message of gradients or parameters between steps: of more, several are sent
    host:        seconds that the host needs to launch the kernels of a layer's forward pass       (fitted);
                 host_moe: of a mixture's layer so many more                                        (fitted);
                 host_backward: of those of the backward pass, in forward passes
    dispatch:    how often tokens go through the memory on their way to experts and back            (fitted)
    fast_attention: how much faster kernels made for Hopper are than FlashAttention-2
                 (Shah et al. 2024, figures 5 and 6: 1.5 to 2.0 forward, 1.5 to 1.75 backward)     (fitted)
    step:        of a whole step, what was measured over what was predicted: what `planner probe` writes
    host_adam:   of offloaded AdamW, its time over that of one fused kernel on all cores of the host
    step_low, step_high: of a step's time, what nine of ten published runs took at least and at most
    error:       how far off a step's time is: the median of a source that the fit had not seen, averaged over sources
    allocator:   peak memory that the allocator reserves, of what is needed: at least and at most          (fitted)
    loss_copies: float32 tensors as large as the logits, at the loss: log-softmax, its gradient and that of the logits,
                 and the 16-bit logits count half. parallel_loss_copies: with DTensor's parallel loss, whose backward
                 pass has log-softmax, its exponential, a mask of the gradient, their sum and its product (torch
                 2.x, distributed/tensor/parallel/loss.py). With fused_loss one and the 16-bit ones
    """

    matmul: float = 0.9
    passes: float = 2.0
    eager: float = 1.5
    attention: float = 1.0
    fp8: float = 1.6
    link: float = 0.8
    network: float = 0.7
    kept: float = 0.89
    async_kept: float = 0.5
    ring: float = 0.5
    memory_rate: float = 0.85
    kernel: float = 6e-6
    alpha_link: float = 2e-6
    alpha_network: float = 8e-6
    alpha_tree: float = 65e-6
    tree: float = 0.33
    ring_alpha: float = 1.0
    all_to_all: float = 0.8
    bucket: float = 256e6
    host: float = 0.95e-3
    host_moe: float = 2.0e-3
    host_backward: float = 1.6
    dispatch: float = 8.0
    fast_attention: float = 1.6
    step: float = 1.0
    host_adam: float = 1.0
    allocator_low: float = 1.0
    allocator: float = 1.05
    allocator_high: float = 1.15
    loss_copies: float = 3.5
    parallel_loss_copies: float = 5.0
    step_low: float = 0.85
    step_high: float = 1.2
    error: float = 0.08
    source: str = "prior"


PRIOR = Constants()
FITTED = ("matmul", "passes", "eager", "attention", "fp8", "link", "network", "async_kept", "ring", "ring_alpha",
          "host", "host_moe", "dispatch", "fast_attention")  # fmt: skip
STORED = Path(__file__).parent / "constants.json"


def _read(path: Path, what: str) -> dict:
    if path == STORED:  # the course's own
        return json.loads(path.read_text())[what]
    from planner import measured  # checks what a stranger may have written, and takes a package for it

    if not path.exists():
        raise UserError(f"--constants {path}: there is no such file; write one with `python -m planner calibrate`")
    content = measured.table_of(path)
    if what not in content:
        raise UserError(f"--constants {path}: not a file that calibrate wrote: it has no {what}")
    return measured.constants_of(path, content[what], {field.name for field in fields(Constants)})


@lru_cache
def load(path: Path | str | None = None) -> Constants:
    """The constants of a file that `scoreboard --refit` or `calibrate` wrote; by default the stored ones."""
    return replace(PRIOR, **_read(Path(path or STORED), "constants"))


def load_halves() -> list[tuple[set[str], Constants]]:
    """(the projects that they were fitted on, constants) of each half of the sources."""
    return [(set(half["projects"]), replace(PRIOR, **half["constants"])) for half in _read(STORED, "halves")]


def save(constants: Constants, path: Path | str = STORED, halves: Sequence[tuple[set[str], Constants]] = (),
         probes: Sequence[float] = ()) -> None:  # fmt: skip
    """Write what load and load_halves read, to four digits; and the ratios that `planner probe` found."""

    def rounded(found: Constants) -> dict:
        return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in asdict(
            found).items()}  # fmt: skip

    written: dict[str, Any] = {"constants": rounded(constants)}
    if halves:
        written["halves"] = [{"projects": sorted(own), "constants": rounded(found)} for own, found in halves]
    if probes:
        written["probes"] = list(probes)
    with writing(path):
        Path(path).write_text(json.dumps(written, indent=1) + "\n")
