"""The checks of the page Choosing's exercises, which the planner judges. grading.py has them in its table."""

from common.constants import GIB
from common.errors import UserError
from common.grading.engine import ExerciseCase, Wrong
from common.grading.patterns import calculated, nothing_sent
from planner import hardware, models
from planner.estimate import Estimate, estimate
from planner.layout import make_layout

MOST_HOST, LEAST_TOKENS = 256, 3200  # GiB, and tokens per second


def fit_on_four_cards(size):
    """Any layout will do of which the planner says so."""

    def judge(got):
        kinds = [int, int, int, str, bool]
        if not isinstance(got, list) or [type(item) for item in got] != kinds:
            raise Wrong("(stage, tensor, micro-batch, recomputation, offload)", str(got))
        stage, tensor, micro_batch, recompute, offload = got
        try:
            found = on_four_cards(stage, tensor, micro_batch, recompute, offload)
        except (UserError, ZeroDivisionError) as error:
            raise Wrong("a layout that the planner takes", str(error)) from None
        host = 4 * found.memory.host / GIB
        if found.fits != "yes" or host > MOST_HOST or found.tokens_per_second < LEAST_TOKENS:
            raise Wrong(
                f"fits: yes, at most {MOST_HOST} GiB of the machine's own memory, at least {LEAST_TOKENS:,} tokens/s",
                f"fits: {found.fits} ({found.memory.expected / GIB:.0f} GiB), {host:.0f} GiB of the machine's own "
                f"memory, {found.tokens_per_second:,.0f} tokens/s",
            )

    if size == 2:
        yield ExerciseCase("fit_on_four_cards()", [()] * size, [judge] * size, nothing_sent)


def on_four_cards(stage: int, tensor: int, micro_batch: int, recompute: str, offload: bool) -> Estimate:
    model, cluster = models.find("llama-13b"), hardware.cluster("rtx-4090", 4, 4)
    mesh = {"shard" if stage else "data": 4 // tensor, "tensor": tensor}
    layout = make_layout(
        model, cluster, mesh, batch_size=64, micro_batch=micro_batch, sequence=2048, zero_stage=stage,
        recompute=recompute, offload=offload, framework="torch",
    )  # fmt: skip
    return estimate(model, cluster, layout)


def best_offer(size):
    """What is dearest by the hour is cheapest by the token in the first row. In the second, what would be cheaper does
    not fit; in the third, one of them fits but tightly; in the last two, nothing does."""
    rows = [
        ("llama-7b", [("a100-80gb", 8, 1.6), ("h100-80gb", 8, 3.0), ("rtx-4090", 8, 0.35)], 2048, 1),
        ("llama-33b", [("a100-40gb", 8, 1.0), ("h100-80gb", 16, 3.0)], 2048, 1),
        ("llama-13b", [("rtx-4090", 8, 0.35), ("l4", 16, 0.4), ("a100-80gb", 8, 1.6)], 8192, 2),
        ("llama-2-70b", [("h100-80gb", 16, 3.0)], 4096, None),
        ("llama-2-70b", [], 4096, None),
    ]
    cases = []
    for name, offers, sequence, best in rows:
        expected = None if best is None else priced(name, *offers[best], sequence)
        cases.append((name, offers, sequence, expected))
    yield from calculated(size, "best_offer", cases)


def priced(name: str, gpu: str, gpus: int, dollars: float, sequence: int) -> list:
    """In an hour the GPUs cost gpus * dollars, and take 3600 / seconds steps of gpus * sequence tokens."""
    model, cluster = models.find(name), hardware.cluster(gpu, gpus)
    layout = make_layout(
        model, cluster, {"shard": gpus}, batch_size=gpus, sequence=sequence, zero_stage=3, recompute="full"
    )
    steps = 3600 / sum(estimate(model, cluster, layout).step.parts.values())
    return [gpu, dollars / steps / sequence * 1e9]
