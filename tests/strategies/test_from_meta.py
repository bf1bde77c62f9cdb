"""Ranks other than 0 may be given a model on the meta device: they end with rank 0's weights, and while a strategy is
made they never hold more than their own share and what is stated beside it."""

import pytest
import torch
import torch.distributed as dist
from gpu_waits import Alive
from helpers import FULL

from common.lab import equality
from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import GPT
from common.strategy import Setup
from course.model_parallel.by_hand_layers import count, layers_of
from course.model_parallel.moe_model import MixtureGPT
from course.pipeline.options import PipelineOptions
from course.strategies import load

RANKS, SMALL = 4, 1024  # bytes of single numbers
HELD = 2  # parameters that have been sent, and that a thread of gloo has not let go yet: one of each of its threads
# (strategy, implementation, mesh): what a rank may have beside its share, as (largest parameters, largest layers).
BESIDE = {
    ("model", "by-hand", "pipeline=4"): (1, 0),
    ("tensor", "by-hand", "tensor=4"): (1, 0),
    ("tensor", "pytorch", "tensor=4"): (2, 0),  # and its part, as it arrives
    ("expert", "by-hand", "expert=4"): (1, 0),
    ("mesh", "by-hand", "pipeline=2,tensor=2"): (1, 0),
    ("mesh", "by-hand", "shard=2,tensor=2"): (0, 1),
    ("mesh", "by-hand", "shard=4"): (0, 2),  # a unit, and its vector, which is on the device
}
if FULL:  # what is cut as the ones above are
    BESIDE |= {("mesh", "by-hand", axes): (1, 0) for axes in ("pipeline=2,data=2", "data=2,tensor=2")}
    BESIDE |= {("sequence", "by-hand", "tensor=4"): (1, 0), ("expert", "by-hand", "data=2,expert=2"): (1, 0)}


def constructed(cases) -> dict:
    """For each case: have this rank's parts, put together on rank 0, the values that rank 0 began with; and bytes: of
    the share, of the whole model, of its largest parameter and layer, and the most that were alive."""
    found = {}
    for name, kind, axes in cases:
        cls = load(name, kind)
        torch.manual_seed(dist.get_rank())
        with torch.device("meta" if dist.get_rank() else "cpu"):
            model = (MixtureGPT if name == "expert" else GPT)(6, 64, 8, 16)
        whole, before = 4 * count(model), {k: v.detach().clone() for k, v in model.state_dict().items()}
        parameter = 4 * max(p.numel() for p in model.parameters())
        layer = 4 * max(map(count, layers_of(model).values()))
        mesh = make_mesh({axis: int(size) for axis, size in (part.split("=") for part in axes.split(","))})
        options = PipelineOptions(microbatches=2) if name == "mesh" else None
        with Alive() as alive:
            strategy = cls(model, equality.sgd, Setup(mesh, options))
        share = sum(part.tensor.nbytes for part in strategy.parts())
        state = strategy.full_state()
        right = not state or all(torch.equal(state["model"][key], value) for key, value in before.items())
        found[name, kind, axes] = right, share, whole, parameter, layer, alive.peak
    return found


@pytest.fixture(scope="module")
def outcomes():
    """Stages with one weight at both ends make a group of some ranks alone, after which all need a new world."""
    alone = [who for who in BESIDE if who[0] == "mesh" and "pipeline" in who[2]]
    found: list[dict] = [{} for _ in range(RANKS)]
    for cases in ([who for who in BESIDE if who not in alone], *([who] for who in alone)):
        for mine, more in zip(found, launch(constructed, RANKS, (cases,), timeout=600), strict=True):
            mine.update(more)
    return found


@pytest.mark.parametrize("who", BESIDE, ids=" ".join)
def test_a_rank_holds_its_share_and_little_beside(who, outcomes):
    parameters, layers = BESIDE[who]
    assert outcomes[0][who][0], "the parts, put together, are not what rank 0 began with"
    for rank, (_, share, whole, parameter, layer, peak) in enumerate([found[who] for found in outcomes[1:]], start=1):
        most = share + (parameters + HELD) * parameter + layers * layer + SMALL
        print(f"rank {rank}: share {share:,} of {whole:,} bytes; alive at most {peak:,}, allowed {most:,}")
        assert share <= peak <= most < whole, f"rank {rank}"
