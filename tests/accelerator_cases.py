"""The cases of test_accelerator.py: every strategy on 4 or on 8 accelerators, and the bytes that each of them says it
holds on a device."""

import tempfile
from dataclasses import dataclass
from zlib import crc32

from helpers import FULL, configure
from strategy_memory import Sizes

from common.mesh import parse_axes, resolve
from course.strategies import STRATEGIES

WIDTH, HEADS, CONTEXT, VOCABULARY = 4096, 8, 16, 256  # so wide that activations of a few tokens are next to nothing
EXPERTS = 16
MESHES = {  # of the strategies that have no mesh of their own
    ("mesh", "pytorch", 4): "shard=2,tensor=2",
    ("mesh", "pytorch", 8): "pipeline=2,shard=2,tensor=2",
    ("mesh", "by-hand", 4): "shard=2,tensor=2",
    ("mesh", "by-hand", 8): "pipeline=2,data=2,tensor=2",
}
ONE_PROCESS = {("dp", "pytorch"), ("dp", "by-hand"), ("model", "pytorch")}  # which drives all of the accelerators


@dataclass(frozen=True)
class Case:
    """A strategy on `size` accelerators, as rank `rank` sees it."""

    strategy: str
    implementation: str
    size: int
    rank: int

    @property
    def who(self) -> tuple[str, str]:
        return self.strategy, self.implementation

    def __str__(self):
        return f"{self.strategy} {self.implementation}, rank {self.rank} of {self.size}"


# In make test what is by hand, and of PyTorch's what is no process group's; in make test-all everything.
DAILY = {("single", "pytorch"), ("model", "pytorch"), ("fsdp", "pytorch")}
WEEKLY = {(name, "pytorch") for name, entry in STRATEGIES.items() if "pytorch" in entry.implementations} - DAILY
KINDS = [
    (strategy, kind)
    for strategy, make_entry in STRATEGIES.items()
    for kind in make_entry.implementations
    if FULL or (strategy, kind) not in WEEKLY
]
FIRST, LAST = (4, 0), (8, 7)  # rank 0 of 4; and of 8 that with a pipeline's last stage, which starts without weights


def places(strategy: str, implementation: str) -> tuple[tuple[int, int], ...]:
    """Where a strategy is examined: with FULL=1 in both places, else in one of them, which its name alone decides (not
    its line in the table, which moves): neither may be that of a few."""
    pipeline = strategy.startswith("pipeline") or strategy == "mesh"
    if (strategy, implementation) in ONE_PROCESS and not FULL:
        return (FIRST,)  # there is no other rank, and eight devices show nothing that four do not
    if FULL:
        return FIRST, LAST
    return (LAST,) if pipeline or crc32(f"{strategy} {implementation}".encode()) % 2 else (FIRST,)


CASES = [Case(*who, *place) for who in KINDS for place in places(*who)]


def settings(case: Case):
    """The settings of the run, examined as those of a command line are."""
    entry, mesh, own = STRATEGIES[case.strategy], MESHES.get((*case.who, case.size)), {}
    cls, alone = entry.implementations[case.implementation], case.who in ONE_PROCESS
    axes = parse_axes(mesh) if mesh else resolve(cls.preset, case.size)
    stages = case.size if case.who == ("model", "pytorch") else axes.get("pipeline", 1)
    if hasattr(cls.Options, "microbatches"):
        own["microbatches"] = 2 * stages if case.strategy == "pipeline+ddp" else stages
    if hasattr(cls.Options, "experts"):
        own["experts"] = EXPERTS
    if mesh:
        own["mesh"] = mesh
    # A block for each stage; the first one has the embedding besides, and the last one the head.
    layers = stages if stages > 1 else (3 if entry.chapter == "06_fsdp" else 2 if "tensor" in axes else 1)
    with tempfile.TemporaryDirectory() as folder:
        return configure(
            "", 1 if alone else case.size, 0 if alone else case.rank,
            strategy=case.strategy, implementation=case.implementation, run_dir=f"{folder}/run", batch_size=256,
            layers=layers, width=WIDTH, heads=HEADS, context=CONTEXT, accumulation_steps=2, **own,
        )  # fmt: skip


def sizes(case: Case) -> Sizes:
    return Sizes(settings(case), case.who, case.size, case.rank)
