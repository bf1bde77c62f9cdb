"""Which layouts `planner plan` looks at, which of them it keeps, and what it says of the nearest one that lost."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

from helpers import refused

from common.constants import GIB
from planner import models, output, search
from planner.hardware import cluster
from planner.layout import Layout
from planner.search import Candidate

SMALL = models.Model("small", 4, 64, 4, 256)  # four layers and four heads
MIXED = models.Model("mixed", 4, 64, 4, 256, experts=2, top_k=1, expert_width=64)


def looked_at(model, gpus: int, per_node: int, batch: int, sequence: int, offload: bool = False) -> set[str]:
    """Every layout of a search, in lines as above; each has all three kinds of recomputation, the least first."""
    found, kinds = {}, {}
    for one in search.layouts(model, cluster("h100-80gb", gpus, per_node), batch, sequence, "bf16", offload):
        told = one.batch_size, one.sequence, one.precision, one.offload
        assert told == (batch, sequence, "bf16", offload), "what all layouts of a search have in common"
        assert math.prod(size for _, size in one.mesh) == gpus, f"ranks of {one.describe()}"
        mesh = ",".join(f"{axis}={size}" for axis, size in one.mesh if size > 1) or "one"
        name = f"{mesh} {one.zero_stage} {one.schedule}-{one.stages_per_rank}"
        found.setdefault(name, dict.fromkeys([])).setdefault(one.micro_batch)
        kinds.setdefault((name, one.micro_batch), []).append(one.recompute)
    assert {tuple(recompute) for recompute in kinds.values()} == {("none", "selective", "full")}, "recomputation"
    return {f"{name}: {' '.join(map(str, micro))}" for name, micro in found.items()}


def meshes(ranks: int, axes: tuple[str, ...]) -> set[str]:
    """Every way to write `ranks` as a product of sizes along the axes."""
    ways = itertools.product(*[[n for n in range(1, ranks + 1) if ranks % n == 0]] * len(axes))
    found = [zip(axes, sizes, strict=True) for sizes in ways if math.prod(sizes) == ranks]
    return {",".join(f"{axis}={size}" for axis, size in pairs if size > 1) for pairs in found}


def test_every_mesh_of_four_gpus_is_looked_at():
    """Two nodes of two: tensor parallelism stays within a node; shards in a node have copies in the others."""
    found = looked_at(SMALL, 4, 2, 8, 1024)
    expected = {mesh for mesh in meshes(4, ("pipeline", "data", "shard", "tensor")) if "tensor=4" not in mesh}
    assert {line.split()[0] for line in found} == expected - {"pipeline=2,shard=2,data=2"}
    for line in found:
        mesh, stage, schedule = line.partition(":")[0].split()
        assert (stage == "0") == ("shard" not in mesh), "shards are what a ZeRO stage divides"
        assert stage != "2" or "pipeline" not in mesh, "which reduces gradients in every micro-batch"
        assert schedule == "1f1b-1" or "pipeline" in mesh
    there = {line.partition(":")[0] for line in looked_at(SMALL, 4, 2, 8, 1024, offload=True)}
    assert not [line for line in there if " 0 " in line and "data" in line], "nothing divides their optimizer"


def test_tensor_parallelism_divides_heads_of_keys_and_values_and_widths_of_experts():
    fewer = [replace(SMALL, kv_heads=2), replace(SMALL, mlp_width=6), replace(MIXED, expert_width=6)]
    for model, most in zip([SMALL, *fewer], (4, 2, 2, 2), strict=True):
        sizes = {line.partition("tensor=")[2][:1] for line in looked_at(model, 4, 4, 4, 1024)}
        assert max(sizes) == str(most), f"the most ranks along 'tensor' of {model}"


def test_sequences_are_cut_where_2048_tokens_stay_on_a_rank():
    assert any("context=2" in line for line in looked_at(SMALL, 4, 4, 4, 4096))
    shorter = looked_at(SMALL, 4, 4, 4, 4094)
    assert not any("context" in line for line in shorter), "2,047 tokens on a rank are too few"


def test_experts_are_divided_where_their_number_divides():
    """As axes whose ranks read sequences of their own: with context or expert parallelism alone, state is divided."""
    found = looked_at(MIXED, 4, 4, 4, 1024)
    assert any("expert=2" in line for line in found) and not any("expert=4" in line for line in found), "there are two"
    two = {line.split(":")[0] for line in looked_at(MIXED, 8, 4, 8, 1024) if line.startswith("data=2,shard")}
    assert two >= {"data=2,shard=2,expert=2 3 1f1b-1", "data=2,shard=4 3 1f1b-1"}, "shards and experts within a node"
    assert "data=3,shard=4 3 1f1b-1: 1" in looked_at(SMALL, 12, 4, 12, 1024), "shards within each of three nodes"
    assert not any("expert" in line for line in looked_at(SMALL, 4, 4, 4, 1024)), "a model without experts"


def test_what_limits_micro_batches_pipelines_and_tensor_parallelism():
    deepest = {line for line in looked_at(SMALL, 4, 4, 8, 1024) if line.startswith("pipeline=4 ")}
    assert deepest == {"pipeline=4 0 1f1b-1: 1 2", "pipeline=4 0 gpipe-1: 4"}, "1F1B takes a micro-batch for each rank"
    assert looked_at(SMALL, 1, 1, 128, 1024) == {"one 0 1f1b-1: 1 2 4 8 16 32"}
    assert looked_at(SMALL, 1, 1, 12, 1024, offload=True) == {"one 0 1f1b-1: 1 2 4"}
    wide = looked_at(SMALL, 8, 8, 8, 1024)
    assert not any("tensor=8" in line or "pipeline=8" in line for line in wide), "four heads, four layers"
    deep = looked_at(replace(SMALL, layers=128, heads=1, width=63, mlp_width=3), 128, 128, 128, 1024)
    most = max(int(line.split(",")[0].split("=")[1]) for line in deep if line.startswith("pipeline"))
    assert most == 64 and {line for line in deep if "pipeline=32," in line and "interleaved" in line} == {
        f"pipeline=32,{axis}=4 {stage} interleaved-2: 1" for axis, stage in (("data", 0), ("shard", 1), ("shard", 3))
    }, "64 stages in all at most"
    eight = looked_at(replace(SMALL, layers=8), 2, 2, 6, 4098)
    assert {line for line in eight if "pipeline" in line} == {
        "pipeline=2 0 1f1b-1: 1 2",
        "pipeline=2 0 interleaved-2: 1",
        "pipeline=2 0 interleaved-4: 1",
    }, "six micro-batches are rounds of two, three are not"
    odd = looked_at(SMALL, 4, 4, 4, 4098)
    assert any("context=2" in line for line in odd) and not any("context=2,tensor=2" in line for line in odd), "4,098"
    odd = looked_at(SMALL, 4, 4, 6, 1024)
    assert not any(line.startswith(("data=4", "shard=4")) for line in odd), "6 sequences for four readers"
    assert "pipeline=4 0 1f1b-1: 1" in odd and not any("=4 0 inter" in line for line in odd), "6 are no rounds of four"


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_optimizer_goes_to_the_host_only_where_nothing_fits_else():
    """A GPU of 40 GB holds 18 bytes for each of 1.6 billion parameters, and not for each of 6.7."""
    for name, offload in (("gpt2-xl", False), ("llama-7b", True)):
        chosen = search.plan(models.find(name), cluster("a100-40gb", 1), 8, 512)
        assert {one.estimate.layout.offload for one in chosen} == {offload}, name


def test_what_can_be_trusted_comes_first_and_what_may_be_faster_last():
    choices = search.plan(models.find("llama-2-7b"), cluster("h100-80gb", 8), 64, 4096)
    chosen = [one.estimate for one in choices]
    lines = output.table(choices).splitlines()
    rows = [next(at for at, text in enumerate(lines) if text.startswith(f"{number:2} ")) for number in range(1, 6)]
    below = [at > lines.index(output.WITH_CARE) for at in rows]
    assert below == [not one.trusted for one in chosen], "the line that says so stands between them"
    fastest = min(chosen, key=lambda one: one.seconds)
    trusted = [one.trusted for one in chosen]
    assert trusted == sorted(trusted, reverse=True) and {*trusted} == {True, False}
    assert fastest is chosen[-1] and fastest.out_of_scope
    # a kind of GPU without published runs: nothing can be trusted, and after the simplest the fastest come first
    chosen = [one.estimate for one in search.plan(models.find("llama-7b"), cluster("rtx-4090", 8), 64, 1024)]
    assert len(chosen) > 1 and not any(one.trusted for one in chosen)
    assert chosen[1:] == sorted(chosen[1:], key=lambda one: one.seconds)


def test_the_order_of_the_search_changes_no_plan(monkeypatch):
    """More layouts fit than are estimated in full: those are the fastest ones, wherever they stand."""
    model, gpus, found = models.find("gpt2-xl"), cluster("a100-80gb", 8), search.candidates
    expected = [one.estimate.seconds for one in search.plan(model, gpus, 64, 1024)]
    monkeypatch.setattr(search, "candidates", lambda *about, **more: found(*about, **more)[::-1])
    assert [one.estimate.seconds for one in search.plan(model, gpus, 64, 1024)] == expected


def test_a_batch_that_does_not_divide_is_told_what_would():
    """One head and one layer leave 32 readers; two of each 16, or 8, each of which then needs two micro-batches."""
    for heads, multiple in ((1, 32), (2, 16)):
        model = replace(SMALL, heads=heads, layers=heads, width=62, mlp_width=2)
        with refused("--batch-size 7", "32 GPUs", f" {multiple}"):
            search.plan(model, cluster("h100-80gb", 32), 7, 512)


def says(text: str, *words: str) -> None:
    assert not [word for word in words if word not in text], text


def test_the_nearest_loser_is_faster_or_the_fastest_that_fits():
    """It differs in one choice, of which mesh and ZeRO's stage count as one."""
    base = Layout((("data", 8),), 64, micro_batch=2)
    chosen = SimpleNamespace(layout=base, seconds=10.0)

    def named(**fields) -> str:
        return replace(base, **fields).describe()

    def told(*others):
        found = [Candidate(replace(base, **fields), seconds, gib * GIB, gib * GIB) for fields, seconds, gib in others]
        return search.loser(chosen, found, 80 * GIB, lambda _: True)

    mesh = {"mesh": (("shard", 8),), "zero_stage": 3}
    large, slow, slower = ({"micro_batch": 8}, 8.0, 90), ({"micro_batch": 1}, 11.0, 70), ({"micro_batch": 4}, 12.0, 80)
    says(told((mesh, 11.0, 20)), named(**mesh), "10%")
    says(told(slower, slow), named(micro_batch=1), "10%")  # the faster of two that fit
    says(told(slow, large), named(micro_batch=8), "20%", "90.0 GiB")  # a faster one
    says(told(({"micro_batch": 8}, 10.5, 90), slower), named(micro_batch=4), "20%")  # not one that doesn't fit either
    says(told(({"micro_batch": 8}, 12.5, 90)), named(micro_batch=8), "90.0 GiB")  # no other
    for far in ({"recompute": "full", "micro_batch": 4}, mesh | {"micro_batch": 4}, {}):
        assert "GiB" not in told((far, 1.0, 10)) and "%" not in told((far, 1.0, 10)), far
    for field in ({"recompute": "full"}, {"stages_per_rank": 2}, {"zero_stage": 1}):
        says(told((field, 12.0, 10)), named(**field), "20%")
