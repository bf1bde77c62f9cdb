"""Times and messages of a step worked out by hand, part by part, on a machine whose numbers are round.

Its links move a GB per second, its products a TFLOP per second, and its memory takes no time. (Sizes of the models:
tests/planner_cases.py.)
"""

import math
from dataclasses import replace

import pytest
from planner_cases import GPT, MIXED, TIED, layout, mesh_of

from planner import layer_time, network, time, traffic
from planner.constants import PRIOR
from planner.hardware import GPU, Cluster

TOY = GPU("toy", 1e12, 1.0, 1e12, 1e24, 1e9, 1e9, 1.0, "none")
BARE = replace(PRIOR, matmul=1.0, passes=0.0, attention=1.0, link=1.0, network=1.0, kept=0.0, async_kept=0.5, ring=0.0,
               memory_rate=1.0, kernel=0.0, alpha_link=0.0, alpha_network=0.0, ring_alpha=0.0, tree=1e-9,
               all_to_all=1.0, bucket=0.0, host=0.0, host_moe=0.0, dispatch=0.0)  # fmt: skip
START = replace(BARE, kernel=1e-3)  # before each product
HIDES, HALF = replace(BARE, kept=1.0), replace(BARE, kept=0.5)  # all of a message beside work, and half of it


def step(text: str, model=GPT, constants=BARE, per_node: int | None = None, hbm: float = 1e24, many: int = 1, **fields):
    """per_node: GPUs of a node, each with an adapter of a tenth of the links' rate; by default all are in one."""
    gpus = math.prod(mesh_of(text).values())
    machine = Cluster(replace(TOY, hbm=hbm), gpus, per_node or gpus, 1e8, per_node or gpus, host=1e9)
    return time.estimate(model, machine, layout(text, many, **fields), constants)


def compare(part: str, rows: list, rel: float = 1e-6) -> None:
    for text, more, expected in rows:
        found = 1000 * step(text, **more).parts[part]
        told = {name: value for name, value in more.items() if name not in ("model", "constants")}
        assert found == pytest.approx(expected, rel=rel, abs=1e-9), f"ms of {part} on {text}, {told}"


FULL, THIRD = {"recompute": "full"}, {"zero_stage": 3}


def test_work():
    """A layer's products take 24 ms and its attention 2; backward 48 and 5. The head takes 2 ms and twice that."""
    compare("work", [
        ("data=1", {}, 4 * 79 + 6),
        ("data=1", {"many": 3}, 3 * (4 * 79 + 6)),
        ("data=1", FULL, 4 * (79 + 26) + 6),
        ("data=1", {"recompute": "attention"}, 4 * (79 + 2) + 6),
        ("data=1", {"recompute": "operators"}, 4 * (79 + 12) + 6),
        ("data=1", {"recompute": "every-second"}, 4 * (79 + 13) + 6),
        ("data=1", {"recompute": "selective"}, 4 * (79 + 2) + 6),
        ("shard=2", {"recompute": "selective"} | THIRD, 4 * (79 + 12) + 6),
        # Beside 32 ms of element-wise work forward and 64 backward: again, or not, is 26 ms of products and this.
        *[("data=1", {"constants": replace(BARE, passes=1e15), "recompute": how}, 4 * (79 + 96 + again) + 6)
          for how, again in (("none", 0), ("attention", 2), ("operators", 44), ("products", 34), ("full", 58))],
        # 60% of the rate, and no half is left out; without tensor cores where a head is 100 wide, as here
        ("data=1", {"flash": False, "model": replace(GPT, heads=125)}, 4 * (72 + 3 * 4 / 0.6) + 6),
        ("data=1", {"flash": False}, 4 * (72 + 3 * 4 * 16) + 6),
        ("data=1", {"precision": "float32"}, 2 * (4 * 79 + 6)),  # TF32 has half of the rate
        ("data=1", {"precision": "float32", "flash": False}, 2 * (4 * (72 + 3 * 4 / 0.6) + 6)),
        ("tensor=2", {}, 4 * 79 / 2 + 3),
        ("context=2", {}, 4 * 79 / 2 + 3),
        ("context=2", {"constants": replace(BARE, ring=1.0)}, 4 * (36 + 1.5 * 3.5) + 3),
        ("data=1", {"model": MIXED}, 2 * 79 + 2 * (24 + 2 + 48 + 5 + 16 + 32) + 6),  # each token uses both experts
        ("expert=2", {"model": MIXED}, 2 * 79 + 2 * (24 + 2 + 48 + 5 + 16 + 32) + 6),  # two tokens for one of them
        ("data=1", {"model": MIXED, "constants": START}, 418 + 3 * (2 * 4 + 2 * 6) + 3),  # products, and the head's
        ("expert=2", {"model": MIXED, "constants": START}, 418 + 3 * (2 * 4 + 2 * 4) + 3),  # of one expert
        ("data=1", {"constants": replace(BARE, matmul=0.5)}, 4 * (2 * 72 + 7) + 12),
        ("data=1", {"constants": replace(BARE, attention=0.5)}, 4 * (72 + 14) + 6),
        ("data=1", {"model": replace(GPT, attention=8_000_000)}, 4 * (3 * 32 + 7) + 6),  # twice as many, as T5's
    ])  # fmt: skip


def test_model_flops_of_a_token():
    """Six for each parameter of a product that a token uses, and attention's 12 x layers x queries x tokens."""
    attention = 12 * 4 * 1000 * 1000
    for model, products, scores in (
        (GPT, 48e6 + 1e6, attention),
        (TIED, 49e6, attention),
        (replace(GPT, positions=500), 49e6, attention),
        (MIXED, 2 * 12e6 + 2 * (4e6 + 2000 + 2 * 8e6) + 1e6, attention),  # two layers with a router and experts
        (replace(MIXED, top_k=1), 2 * 12e6 + 2 * (4e6 + 2000 + 8e6) + 1e6, attention),
        (replace(GPT, head_width=50), 4 * 10e6 + 1e6, attention / 2),
        (replace(GPT, kv_heads=5), 4 * 11e6 + 1e6, attention),
    ):
        assert model.flops(1000) == 6 * products + scores, f"FLOPs of a token, {model}"


def test_a_product_goes_through_the_memory_as_well():
    """[2, 3] x [3, 5]: 60 operations at half of 60 a second, and 31 numbers in 16 bit at half of 62 bytes a second."""
    machine, half = replace(TOY, peak=60.0, hbm=62.0), replace(BARE, matmul=0.5, memory_rate=0.5, kernel=0.25)
    assert layer_time.product(2, 3, 5, machine, "bf16", half) == 2 + 2 + 0.25, "arithmetic, bytes, and the start"
    assert layer_time.product(2, 3, 5, machine, "float32", half) == 4 + 4 + 0.25, "of 32 bit numbers"


def test_element_wise_work():
    """What a layer keeps goes through a memory of a GB per second: 16 numbers of each token and width, 32 MB."""
    once, swiglu = replace(BARE, passes=1.0, eager=1.5), replace(GPT, mlp="swiglu")
    stored, dropout, whole = {"flash": False}, {"dropout": True}, {"sequence_parallel": False}
    for text, model, fields, constants, expected in (
        ("data=1", GPT, {}, once, 32), ("data=1", GPT, {}, replace(once, passes=3.0), 96),
        ("data=1", GPT, {}, replace(once, memory_rate=0.5), 64), ("data=1", GPT, {"precision": "float32"}, once, 64),
        ("data=1", GPT, {"fused": False}, once, 1.5 * 32), ("context=2", GPT, {}, once, 16),
        ("tensor=2", GPT, {}, once, 16), ("tensor=2", GPT, whole, once, 8 + 12),
        ("data=1", GPT, dropout, once, 32 + 2), ("tensor=2", GPT, dropout | whole, once, 10 + 12),  # masks of a byte
        ("data=1", GPT, stored, once, 32 + 20), ("tensor=2", GPT, stored, once, 16 + 10),  # scores of ten heads
        ("data=1", GPT, stored | dropout, once, 34 + 50), ("data=1", replace(GPT, kv_heads=5), {}, once, 30),
        ("data=1", swiglu, {}, once, 16 + 24), ("data=1", swiglu, {"fused": False}, once, 1.5 * (16 + 32)),
        ("data=1", MIXED, {}, once, 48),  # of both experts
    ):  # fmt: skip
        one = layer_time.of_layer(model, replace(TOY, hbm=1e9), layout(text, **fields), model is MIXED, constants)
        found = 1000 * one.elementwise, 1000 * one.backward_elementwise
        assert found == pytest.approx((expected, 2 * expected)), f"ms forward and backward on {text}, {fields}"


def test_messages_in_layers():
    """An all-reduce of the stream over two ranks takes 2 ms: two forward, two backward, and two for what is computed
    again. Keys and values of all tokens, 4 MB, are gathered in 2 ms. Each token goes to both experts and comes back."""
    compare("messages in layers", [
        ("data=2", {}, 0),
        ("tensor=2", {}, 4 * 4 * 2),
        ("tensor=2", {"many": 3}, 3 * 4 * 4 * 2),
        ("tensor=2", FULL, 4 * 6 * 2),
        ("tensor=2", {"recompute": "every-second"}, 4 * 5 * 2),
        ("tensor=2", {"recompute": "attention"}, 4 * 4 * 2),
        ("tensor=2", {"precision": "float32"}, 4 * 4 * 4),
        ("tensor=2", {"per_node": 1}, 4 * 4 * 20),
        ("tensor=2", {"async_tensor": True}, 4 * 4 * 1),  # half of it is hidden
        ("tensor=2", {"async_tensor": True, "per_node": 1}, 4 * 4 * (20 - 0.5 * 6)),  # beside a product of 6 ms
        ("context=2", {}, 4 * 3 * 2),
        ("context=2", FULL, 4 * 4 * 2),
        ("context=2", {"constants": HIDES}, 4 * ((2 - 1) + (4 - 2.5))),
        ("context=2", {"constants": HIDES} | FULL, 4 * ((2 - 1) + (4 - 2.5) + (2 - 1))),
        ("context=2 tensor=2", {}, 4 * (3 * 1 + 4 * 1)),
        ("expert=2", {"model": MIXED}, 2 * 4 * 2),  # in two of four layers
        ("expert=2", {"model": MIXED} | FULL, 2 * 6 * 2),
        ("expert=2 tensor=2", {"model": MIXED}, 2 * 4 * 1 + 4 * 4 * 2),  # each routes half of the sequence
        ("expert=2 tensor=2", {"model": MIXED, "sequence_parallel": False}, 2 * 4 * 2 + 4 * 4 * 2),
        ("pipeline=2 tensor=2", {}, 2 * 4 * 2),
        ("pipeline=2 tensor=2", {"stages_per_rank": 2, "schedule": "interleaved", "many": 2}, 2 * 2 * 4 * 2),
    ])  # fmt: skip


def test_messages_of_state():
    """Gradients have 200.036 MB in float32, and parameters 100.018 in 16 bit; a layer's 48.008 and 24.004."""
    gather, scatter = 12.002, 24.004  # of a layer over two ranks
    layers = 2 * gather + scatter  # gathered forward and backward, and reduced
    ends = 2 + 4  # embedding and head
    both, slow = gather + scatter, {"per_node": 1, "constants": HIDES}
    compare("messages of state", [
        ("data=1", {}, 0),
        ("data=2", {}, 200.036),
        ("data=2", {"constants": HALF}, 100.018),  # the backward pass takes longer
        ("data=2", {"constants": HIDES}, 0),
        ("data=2", {"constants": HIDES, "overlap_gradients": False}, 200.036),
        ("data=2", slow, 2000.36 - (4 * 53 + 4)),
        ("data=2 tensor=2", {}, 4 * (4 * 6.002 + 1.001)),
        ("pipeline=2 data=2", {}, 4 * (2 * 12.002 + 1.001)),
        ("pipeline=2", {"model": TIED}, 4),  # gradients of the embedding, to the other stage that has it
        ("pipeline=2", {"model": TIED, "per_node": 1}, 40),
        ("shard=2", {"zero_stage": 1, "many": 2}, 100.018 + 50.009),
        ("shard=2", {"zero_stage": 1, "constants": HIDES}, 0),
        ("shard=2", {"zero_stage": 1, "constants": HIDES, "overlap_gradients": False}, 150.027),
        ("shard=2", {"zero_stage": 1, "constants": HIDES, "overlap_gradients": False, "per_node": 1}, 1500.27),
        ("shard=2", {"zero_stage": 2, "many": 2} | slow, 2 * (1000.18 - 216) + 500.09 - 106),
        ("data=2 shard=2", {"zero_stage": 1}, 150.027 + 100.018),  # copies sum the half that reduce-scatter left
        ("pipeline=2 shard=2", {"zero_stage": 2, "many": 2}, 50.010 + 25.005),  # once a step
        ("shard=2", THIRD, ends + both + 4 * layers),
        ("shard=2", {"many": 2} | THIRD, 2 * (ends + 4 * layers) + both),
        ("shard=2", {"constants": HIDES} | THIRD, ends + both),
        ("shard=2", {"constants": HALF} | THIRD, ends + both + 4 * layers / 2),
        ("shard=2", slow | THIRD, 10 * (ends + both) + 4 * (10 * gather - 26 + 10 * both - 53)),
        ("shard=2", slow | THIRD | FULL, 10 * (ends + both) + 4 * (10 * gather - 26 + 10 * both - 79)),
        ("shard=2 context=2", {"shard_context": False} | THIRD, ends + both + 4 * layers + 100.018),
        ("pipeline=2 data=2 shard=2", THIRD, 2 * both + 4 * (2 * 12.002 + 1.001) / 2),
        # Of a mixture, ranks along "expert" have different experts: 16 million parameters each, 4 million a layer.
        ("expert=2", {"model": MIXED}, 4 * 34.013),
        ("data=2 expert=2", {"model": MIXED}, 1.5 * 4 * 34.013 + 4 * 16),
        ("expert=2", {"model": MIXED} | THIRD, ends + 3 * 8.003 + 4 * 4 * 8.003),
        ("data=2 shard=2 expert=2", {"model": MIXED, "zero_stage": 1}, (1.5 * 3 + 1) * 34.013 + 3 * 16 + 2 * 16),
        ("shard=2 expert=2", {"model": MIXED} | THIRD, 1.5 * (ends + 3 * 8.003 + 4 * 4 * 8.003) + 3 * 4 + 4 * 4 * 4),
    ])  # fmt: skip


def test_the_optimizer():
    """42 bytes of a parameter through a memory of a TB per second. Offloaded, 6 bytes over PCIe and 30 through the
    host's memory, a GB per second each; FSDP's shards come from there for every gathering but the first."""
    hbm, dense, experts = {"hbm": 1e12}, 34.013, 16.0  # millions, of a mixture on one of two ranks along "expert"
    compare("optimizer", [
        ("data=2", hbm, 50.009 * 42e-3),
        ("shard=2", {"zero_stage": 1} | hbm, 50.009 / 2 * 42e-3),
        ("data=1", {"constants": replace(BARE, memory_rate=0.5)} | hbm, 2 * 50.009 * 42e-3),
        ("pipeline=2", hbm, 25.005 * 42e-3),
        ("expert=2", {"model": MIXED} | hbm, (dense + experts) * 42e-3),
        ("shard=2 expert=2", {"model": MIXED} | THIRD | hbm, (dense / 4 + experts / 2) * 42e-3),
        ("data=1", {"offload": True}, 50.009 * (6 + 30)),
        ("data=2", {"offload": True}, 50.009 * (6 + 30 * 2)),
        ("data=2", {"offload": True, "per_node": 1}, 50.009 * (6 + 30)),
        ("shard=2", {"offload": True, "many": 2} | THIRD, 50.009 / 2 * (6 + 2 * 3 + 30 * 2)),
        ("shard=2", {"offload": True, "many": 2, "zero_stage": 2}, 50.009 / 2 * (6 + 30 * 2)),
        ("pipeline=2 shard=2", {"offload": True, "many": 2} | THIRD, 25.005 / 2 * (6 + 30 * 4)),
    ])  # fmt: skip


def test_the_host_that_launches_kernels_sets_a_floor():
    """A layer takes 26 ms forward and 53 backward; a host that needs 30 and twice that adds what is missing, and some
    more, since both take about as long; so it is with what is computed again, which is launched again. One that needs a
    tenth adds nothing."""
    slow = replace(BARE, host=30e-3, host_backward=2.0)
    for more, lacks in (({}, 4 + 7), (FULL, 4 + 90 - 79)):
        host, none = (step("data=1", constants=constants, **more).parts["work"] for constants in (slow, BARE))
        assert 4 * lacks < 1000 * (host - none) < 1.35 * 4 * lacks, f"ms of four layers, {more}"
    hidden = step("data=1", constants=replace(slow, host=3e-3))
    assert hidden.seconds == pytest.approx(step("data=1", constants=BARE).seconds, rel=1e-6)


def test_waiting_is_the_bubble():
    """In a pipeline of two, the rank with the head waits for the other's forward and backward pass and for two messages
    of the stream, of which each tensor rank sends its part: half of it, or all where each has it whole."""
    one, two = (52, 106), (34, 61)  # ms of a stage of two layers, alone and beside a tensor rank, with their messages
    compare("bubble", [
        ("data=2", {}, 0),
        ("pipeline=2", {}, sum(one) + 2 * 2),
        ("pipeline=2", {"per_node": 1}, sum(one) + 2 * 20),
        ("pipeline=2", {"precision": "float32"}, 2 * sum(one) + 2 * 4),
        ("pipeline=2 tensor=2", {}, sum(two) + 2 * 1),
        ("pipeline=2 tensor=2", {"per_node": 2}, sum(two) + 2 * 10),
        ("pipeline=2 tensor=2", {"sequence_parallel": False}, sum(two) + 2 * 2),
        ("pipeline=2 context=2", {}, sum(one) / 2 + 2 * 3 * 2 + 2 * 1),
    ], rel=4e-3)  # fmt: skip  # times are rounded, so that layouts share a run of the simulator
    found = step("pipeline=2 tensor=2", many=4, model=TIED)
    one = found.parts
    assert found.bubble == one["bubble"] / found.seconds
    assert found.exposed == pytest.approx(one["messages in layers"] + one["messages of state"]), "what nothing hides"
    assert found.seconds == sum(one.values()) and found.links == traffic.sent(TIED, layout("pipeline=2 tensor=2", 4))


# --- groups and their messages ----------------------------------------------------------------------------------------


def test_a_collective_takes_what_its_slowest_link_takes():
    """Eight ranks on two nodes: rings leave a node by its four adapters of 10 bytes per second."""
    two, one = network.Group(4, 2, 100.0, 10.0, 1.0, 10.0), network.Group(4, 1, 100.0, 10.0, 1.0, 10.0)
    assert two.seconds("all_reduce", 800.0) == 2 * 700 / 40 + 2 * 7 * 10, "a ring has the network's pace in each step"
    assert two.seconds("all_gather", 800.0) == 700 / 40 + 7 * 10, "an all-gather over two nodes"
    tree = replace(two, alpha_tree=5.0, tree=0.5)
    assert tree.seconds("all_reduce", 8.0) == 2 * 3 * 1 + 5 + 2 * 8 / 20, "small messages take a tree of two nodes"
    assert tree.seconds("all_reduce", 8e6) == two.seconds("all_reduce", 8e6), "and large ones the ring"
    # Half of what a rank hands in is for the other node, and leaves by its own adapter.
    assert two.seconds("all_to_all", 800.0) == 7 * 10 + 400 / 10, "an all-to-all over two nodes"
    assert one.seconds("all_reduce", 800.0) == 2 * 600 / 100 + 2 * 3 * 1, "an all-reduce in one node"
    assert replace(two, network=50.0).seconds("all_gather", 800.0) == 700 / 100 + 70, "adapters faster than links"
    assert network.Group(1, 1, 100.0, 10.0, 1.0, 10.0).seconds("all_reduce", 800.0) == 0, "one rank sends nothing"


def test_groups_of_several_axes():
    """(ranks in a node, nodes), in nodes of eight GPUs that share four adapters."""
    one = layout("pipeline=2 data=2 shard=4 context=2 tensor=2")
    nodes = Cluster(TOY, 64, 8, 1e8, 4)
    some = replace(PRIOR, link=0.5, network=0.25)
    for axes, expected in (
        (("shard", "context", "expert"), (4, 2)), (("data",), (1, 2)), (("pipeline",), (1, 2)), (("tensor",), (2, 1)),
        (("context",), (2, 1)), (("shard",), (2, 2)), (("expert",), (1, 1)), (("data", "shard", "context"), (4, 4)),
    ):  # fmt: skip
        found = network.group(nodes, one, some, *axes)
        assert (found.local, found.nodes) == expected, f"the group along {', '.join(axes)}"
        assert (found.link, found.network) == (0.5 * 1e9, 0.25 * 1e8 * 4 / 8), "bytes per second of a rank"
        assert (found.alpha_link, found.alpha_network) == (some.alpha_link, nodes.alpha * some.ring_alpha)
    meshes = ("pipeline=2 data=4", "pipeline=2 data=8")
    sent = [network.neighbour_seconds(nodes, layout(text), some, 1e6) for text in meshes]
    expected = [some.alpha_link + 1e6 / 5e8, some.alpha_network + 1e6 / 1.25e7]
    assert sent == pytest.approx(expected), "to the next stage in a node, and outside"
