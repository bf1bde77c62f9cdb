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
    send at the same time."""

    local: int
    nodes: int
    link: float
    network: float
    alpha_link: float
    alpha_network: float

    @property
    def size(self) -> int:
        return self.local * self.nodes

    def seconds(self, operation: str, payload: float) -> float:
        """Of one collective over a full payload (bytes, as in wire_bytes). Rings pass through all ranks, as many of
        them as the group has ranks in a node, and each leaves the node by another adapter: so a ring is as fast as
        links, or as the adapters of the group's ranks together, whichever is slower. Latency is that of two levels:
        one message to each other rank of the node, and one to each other node."""
        if self.size == 1:
            return 0.0
        bandwidth = self.link if self.nodes == 1 else min(self.link, self.local * self.network)
        latency = collective_seconds(operation, 0.0, self.local, self.alpha_link, 1.0)
        latency += collective_seconds(operation, 0.0, self.nodes, self.alpha_network, 1.0)
        return collective_seconds(operation, payload, self.size, 0.0, bandwidth) + latency


def group(cluster: Cluster, layout: Layout, constants: Constants, *axes: str) -> Group:
    """The group of a rank over these axes of the mesh, which lie one inside of the other."""
    size = math.prod(layout.size(axis) for axis in axes)
    named = [axis for axis in axes if layout.size(axis) > 1]
    inner = AXES[max((AXES.index(axis) for axis in named), default=0) + 1 :]
    stride = math.prod(layout.size(axis) for axis in inner) if named else 1
    local = math.gcd(size, max(1, cluster.gpus_per_node // stride)) if stride < cluster.gpus_per_node else 1
    per_rank = cluster.node_network / cluster.gpus_per_node
    return Group(
        local, size // local, cluster.gpu.link * constants.link, per_rank * constants.network,
        constants.alpha_link, constants.alpha_network,
    )  # fmt: skip


def neighbour_seconds(cluster: Cluster, layout: Layout, constants: Constants, payload: float) -> float:
    """Of one message to the next stage."""
    inner = math.prod(layout.size(axis) for axis in AXES[1:])
    if inner < cluster.gpus_per_node:
        return collective_seconds("send", payload, 2, constants.alpha_link, cluster.gpu.link * constants.link)
    per_rank = cluster.node_network / cluster.gpus_per_node * constants.network
    return collective_seconds("send", payload, 2, constants.alpha_network, per_rank)
