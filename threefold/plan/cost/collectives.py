"""Seconds of collectives: rings over the links inside and between nodes.

A ring moves (n - 1) / n of the bytes through every link for a gather or a scatter, twice that for a sum (Patarasuk and
Yuan, JPDC 2009). Where a group spans nodes, NCCL lays as many rings as the group has devices in a node, each through a
network adapter of its own, so that a device's share of the bandwidth is that of all of these together, but no more than
of the links inside.
"""

from dataclasses import dataclass
from math import ceil, log2

from threefold.plan.cost.kernels import larger
from threefold.plan.hardware.entry import Hardware

_WIRE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Group:
    """Ranks of an axis, at equal distances.

    Attributes:
        ranks: how many.
        stride: from one to the next, in ranks of the world.
        per_node: ranks of a node.
    """

    ranks: int
    stride: int
    per_node: int

    @property
    def in_node(self) -> int:
        """Of its ranks, those of one node."""
        return max(1, min(self.ranks, self.per_node // self.stride))

    @property
    def nodes(self) -> int:
        """How many nodes it spans."""
        return ceil(self.ranks / self.in_node)


def ring_seconds(hardware: Hardware, group: Group, operation: str, nbytes: float) -> float:
    """Of one collective.

    Args:
        hardware: of the ranks.
        group: that take part.
        operation: `all_reduce`, `all_gather` or `reduce_scatter`.
        nbytes: of the whole tensor.
    """
    if group.ranks == 1:
        return 0.0
    rounds = _WIRE[operation]
    moved = rounds * nbytes * (group.ranks - 1) / group.ranks
    passes = (
        2 if hardware.device == "cpu" else rounds
    )  # ranks that share memory wait once for each other, whatever they do
    return moved / bandwidth(hardware, group) + passes * latency(hardware, group)


def bandwidth(hardware: Hardware, group: Group) -> float:
    """Bytes per second of a device in a ring of the group."""
    inside = hardware.inside.bandwidth * hardware.achievable.link
    if group.nodes == 1:
        return inside
    return min(inside, group.in_node * hardware.between.bandwidth * hardware.achievable.network)


def latency(hardware: Hardware, group: Group) -> float:
    """Of one pass through the group: trees have logarithmic depth. Ranks of a CPU all wait for the last of them."""
    if hardware.device == "cpu":
        return hardware.inside.latency
    inside = hardware.inside.latency * log2(group.in_node) if group.in_node > 1 else 0.0
    return inside + (hardware.between.latency * log2(group.nodes) if group.nodes > 1 else 0.0)


def all_to_all_seconds(hardware: Hardware, group: Group, nbytes: float) -> float:
    """Of an all-to-all in which each rank sends so many bytes, its own part among them."""
    if group.ranks == 1:
        return 0.0
    inside = nbytes * (group.in_node - 1) / group.ranks
    outside = nbytes * (group.ranks - group.in_node) / group.ranks
    reached = hardware.achievable
    return larger(
        inside / (hardware.inside.bandwidth * reached.link), outside / (hardware.between.bandwidth * reached.network)
    ) + latency(hardware, group)


def send_seconds(hardware: Hardware, group: Group, nbytes: float) -> float:
    """Of sending to the next rank of the group, the slowest of its links."""
    if group.ranks == 1:
        return 0.0
    link, reached = (
        (hardware.inside, hardware.achievable.link)
        if group.nodes == 1
        else (hardware.between, hardware.achievable.network)
    )
    return link.latency + nbytes / (link.bandwidth * reached)
