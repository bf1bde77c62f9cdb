"""Messages: which links a group of ranks crosses, and how long its collectives take over them."""

import math
from dataclasses import dataclass

from common.axes import AXES
from course.intro.costs import collective_seconds
from planner.constants import Constants
from planner.hardware import Cluster
from planner.layout import Layout


@dataclass(frozen=True)
class Group:
    """Ranks that send each other messages: `local` of them in a node, on `nodes` nodes. `link` and `network` are bytes
    per second that one rank sends over the links of its node, and between nodes, where all other groups of the node
    send at the same time; `single` the same for one message between two ranks at a time, as in an all-to-all.

    alpha_link: seconds of a message in a node; alpha_network: of each rank of a ring over several nodes; alpha_tree: of
    each doubling of the nodes; tree: share of a ring's bandwidth that a tree has
    """

    local: int
    nodes: int
    link: float
    network: float
    alpha_link: float
    alpha_network: float
    alpha_tree: float = float("inf")
    tree: float = 1.0
    single: float = 0.0

    @property
    def size(self) -> int:
        return self.local * self.nodes

    def seconds(self, operation: str, payload: float) -> float:
        """How long one collective takes over a full payload (bytes, as in wire_bytes).

        In a node, a ring: a message's latency for each of its steps. Over several nodes rings pass through all ranks,
        and each ring leaves the node by another adapter: so it is as fast as links, or as the adapters of the group's
        ranks together, whichever is slower, and each of its steps has the network's latency, since the slowest one
        sets the pace. NCCL takes trees for an all-reduce of small and middle messages: their latency grows with the
        logarithm of the nodes, and their bandwidth is smaller. In an all-to-all each rank sends what leaves the node
        by its own adapter.
        """
        if self.size == 1:
            return 0.0
        if self.nodes == 1:
            return collective_seconds(operation, payload, self.size, self.alpha_link, self.link)
        if operation == "all_to_all":
            outside = payload * (self.size - self.local) / self.size / (self.single or self.network)
            inside = payload * (self.local - 1) / self.size / self.link
            return (self.size - 1) * self.alpha_network + max(outside, inside)
        bandwidth = min(self.link, self.local * self.network)
        ring = collective_seconds(operation, payload, self.size, self.alpha_network, bandwidth)
        if operation != "all_reduce":
            return ring
        inside = collective_seconds(operation, 0.0, self.local, self.alpha_link, 1.0)
        tree = inside + math.log2(self.nodes) * self.alpha_tree + 2 * payload / (self.tree * bandwidth)
        return min(ring, tree)

    def dispatch(self, tokens: float, copies: int) -> float:
        """How long it takes to send tokens (bytes of each rank) to so many experts each, which are dealt out over the
        ranks, where each node gets a token once and hands it on over its links (Zhao et al. 2025, "DeepEP")."""
        if self.nodes == 1:
            return self.seconds("all_to_all", copies * tokens)
        elsewhere = (self.nodes - 1) * (1 - (1 - 1 / self.nodes) ** copies)  # other nodes that have one of its experts
        outside = elsewhere * tokens / (self.single or self.network)
        inside = copies * tokens * (self.local - 1) / self.local / self.link
        return (self.size - 1) * self.alpha_network + max(outside, inside)


def group(cluster: Cluster, layout: Layout, constants: Constants, *axes: str) -> Group:
    """The group of a rank over these axes of the mesh, which lie one inside of the other."""
    size = math.prod(layout.size(axis) for axis in axes)
    named = [axis for axis in axes if layout.size(axis) > 1]
    inner = AXES[max((AXES.index(axis) for axis in named), default=0) + 1 :]
    stride = math.prod(layout.size(axis) for axis in inner) if named else 1
    local = math.gcd(size, max(1, cluster.gpus_per_node // stride)) if stride < cluster.gpus_per_node else 1
    per_rank = cluster.node_network / cluster.gpus_per_node
    return Group(
        local, size // local, cluster.gpu.link * constants.link, per_rank * constants.network, constants.alpha_link,
        cluster.alpha * constants.ring_alpha, constants.alpha_tree, constants.tree, per_rank * constants.all_to_all,
    )  # fmt: skip


def outside(cluster: Cluster, layout: Layout, constants: Constants, axis: str) -> tuple[int, float]:
    """The nodes that a group along an axis of traffic.sent lies on, and the share of what its ranks send along it that
    leaves their nodes: of a ring, what one of the ranks of a node sends; of a pipeline, what goes over those borders of
    stages that are borders of nodes; of an all-to-all, what is for ranks elsewhere."""
    if axis == "host":
        return 1, 0.0
    together = {"expert": ("expert", "tensor") if layout.whole_experts else ("expert",),
                "shard": ("shard", *(("context",) if layout.shard_context else ()), "expert"),
                "data": ("data",) if layout.zero_stage else AXES[1:-1]}  # fmt: skip
    ranks = group(cluster, layout, constants, *together.get(axis, (axis,)))
    if ranks.nodes == 1:
        return 1, 0.0
    if axis == "expert":
        return ranks.nodes, (ranks.size - ranks.local) / (ranks.size - 1)
    return ranks.nodes, (ranks.nodes - 1) / (ranks.size - 1) if axis == "pipeline" else 1 / ranks.local


def neighbour_seconds(cluster: Cluster, layout: Layout, constants: Constants, payload: float) -> float:
    """How long one message to the next stage takes."""
    inner = math.prod(layout.size(axis) for axis in AXES[1:])
    if inner < cluster.gpus_per_node:
        return collective_seconds("send", payload, 2, constants.alpha_link, cluster.gpu.link * constants.link)
    per_rank = cluster.node_network / cluster.gpus_per_node * constants.network
    return collective_seconds("send", payload, 2, constants.alpha_network, per_rank)
