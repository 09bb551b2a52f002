"""What a rank holds between two steps, and which of it other ranks hold too."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import axes_of, is_split, offset
from threefold.parallel.weights import Weight
from threefold.train.optimizer import Optimizer
from threefold.train.optimizers.base import Entry


@dataclass(frozen=True)
class Watched:
    """A tensor that is to stay as the last update left it.

    Attributes:
        label: what it is, for a message.
        identity: what it is a copy of: ranks whose identities are equal hold the same bits.
        sharing: equal for tensors of this rank that the same ranks have copies of.
        tensor: on this rank.
    """

    label: str
    identity: str
    sharing: tuple[str, ...]
    tensor: Tensor


def watched_tensors(model: TrainableModel, optimizer: Optimizer, sums_alike: bool = True) -> list[Watched]:
    """The weights of this rank, those that it computes with and their masters, and the optimizer state; the same order
    on ranks that hold the same.

    Args:
        model: of this rank.
        optimizer: its.
        sums_alike: as `sums_alike` says; else what tensor ranks hold whole is no copy of one another.
    """
    entries = {entry.name: entry for entry in optimizer.entries}
    return [
        found
        for weight in model.weights
        for found in _of_weight(weight, entries.get(weight.name), model, optimizer, sums_alike)
    ]


def sums_alike(model: TrainableModel) -> bool:
    """Whether tensor ranks add up the gradients of weights that they hold whole in the same order.

    They do on a CPU (`threefold.parallel.data`). With NCCL the order of a sum over three replicas or more follows from
    the group of ranks, so that sums may differ by a rounding. The same on all ranks.
    """
    mesh = model.parallelism.mesh
    return mesh.tp.size == 1 or mesh.replicas.size < 3 or mesh.device.type == "cpu"


def most_groups(model: TrainableModel, optimizer: Optimizer) -> int:
    """How many values `sharing` has at most on this rank."""
    return 2 * len({_sharing(weight, model) for weight in model.weights})


def _of_weight(
    weight: Weight, entry: Entry | None, model: TrainableModel, optimizer: Optimizer, alike: bool
) -> Iterator[Watched]:
    column = "" if alike or is_split(weight.parameter) else f" of tensor rank {model.parallelism.mesh.tp.index}"
    place = f"{weight.name}{column} {offset(weight.parameter)}"
    sharing = _sharing(weight, model)
    yield _watched(weight.name, f"{place} master", sharing, weight.master)
    if weight.master is not weight.leaf:
        yield _watched(f"{weight.name}, as computed with,", f"{place} leaf", sharing, weight.leaf)
    if entry is None:  # frozen
        return
    for state, value in optimizer.rule.state(entry).items():
        label = f"{state} of {entry.name}"
        if optimizer.rule.is_replicated(entry, state, value):
            # Cut along no dim of a matrix; of a batch of matrices (experts) a rank has its own.
            batch = offset(entry.parameter)[:-2]
            yield _watched(label, f"{entry.name}{column} {batch} {state}", ("replicated", *sharing), value)
        else:
            yield _watched(label, f"{place} {state}", sharing, value)


def _watched(label: str, identity: str, sharing: tuple[str, ...], tensor: Tensor) -> Watched:
    return Watched(label, f"{identity} {tuple(tensor.shape)} {tensor.dtype}", sharing, tensor)


def _sharing(weight: Weight, model: TrainableModel) -> tuple[str, ...]:
    tied = (weight.name,) if weight.name in model.tied else ()
    return (*sorted(axes_of(weight.parameter)), *tied)


def grouped(watched: Sequence[Watched]) -> Mapping[tuple[str, ...], list[int]]:
    """The places in `watched` by `sharing`."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, each in enumerate(watched):
        groups.setdefault(each.sharing, []).append(place)
    return groups


def identity_of(watched: Sequence[Watched]) -> int:
    """A positive 63-bit number that is equal for equal identities in equal order."""
    digest = hashlib.blake2b("\n".join(each.identity for each in watched).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1 or 1
