"""What a step's times are made of, worked out by hand: operations, products, and messages of groups of ranks. (Whole
steps: numbers.jsonl.)
"""

from dataclasses import replace

from planner import layer_time, network
from planner.constants import PRIOR
from planner.hardware import GPU

TOY = GPU("toy", 1e12, 1.0, 1e12, 1e24, 1e9, 1e9, 1.0, "none")


def test_a_product_goes_through_the_memory_as_well():
    """[2, 3] x [3, 5]: 60 operations at half of 60 a second, and 31 numbers in 16 bit at half of 62 bytes a second."""
    machine, half = replace(TOY, peak=60.0, hbm=62.0), replace(PRIOR, matmul=0.5, memory_rate=0.5, kernel=0.25)
    assert layer_time.product(2, 3, 5, machine, "bf16", half) == 2 + 2 + 0.25, "arithmetic, bytes, and the start"
    assert layer_time.product(2, 3, 5, machine, "float32", half) == 4 + 4 + 0.25, "of 32 bit numbers"


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
