"""Checks that the ranks of a replica read the same samples, and different replicas different ones."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.resolve import is_derived, with_micro_batch
from threefold.data.loader import Batch, fingerprint
from threefold.errors import UserError
from threefold.models.own_batch import batch_shapes, map_tensors
from threefold.train.callbacks.base import Callback


def agree_on_micro_batch(config: Config, mesh: Mesh) -> Config:
    """Set the default micro-batch size to the smallest of all ranks, as each derives it from the memory of its host.

    A collective over the world.

    Args:
        config: resolved.
        mesh: this rank's.
    """
    if not is_derived(config, "train.micro_batch_size"):
        return config
    # A sum in which each rank has its own element: every backend has all-reduce.
    sizes = torch.zeros(mesh.world.size, dtype=torch.int64, device=mesh.device)
    sizes[mesh.rank] = config.train.micro_batch_size
    smallest = int(mesh.world.all_reduce_(sizes).min())
    return config if smallest == config.train.micro_batch_size else with_micro_batch(config, smallest)


class DataCheck(Callback):
    """Compares fingerprints of the ranks' batches at the first step and every `every` steps; a mismatch ends the run.

    On every rank, as it calls a collective.

    Args:
        mesh: this rank's.
        every: steps between comparisons.
        rows: of this rank in the global batch, for batches that do not have them.

    Raises:
        UserError: on every rank, naming a rank that reads other samples.
    """

    def __init__(self, mesh: Mesh, every: int, rows: Sequence[int] = ()) -> None:
        self.mesh, self.every, self.rows = mesh, every, tuple(rows)
        self._compared = False

    def before_step(self, step: int, batch: Any) -> None:
        if self.mesh.world.size == 1 or (self._compared and step % self.every):
            return
        self._compared = True
        # A sum in which each rank has its own element: cheaper than gathering on every backend.
        table = torch.zeros(self.mesh.world.size, dtype=torch.int64, device=self.mesh.device)
        table[self.mesh.rank] = fingerprint(batch) if isinstance(batch, Batch) else nested_fingerprint(batch, self.rows)
        found = self.mesh.world.all_reduce_(table).tolist()
        if problem := disagreement(found, self.mesh.layout):
            raise UserError(f"At step {step} {problem}.")


def nested_fingerprint(batch: Any, rows: Sequence[int]) -> int:
    """As `fingerprint`, of a batch that is a nesting of tensors on the CPU, and its rows in the global batch."""
    digest = hashlib.blake2b(repr((batch_shapes(batch), tuple(rows))).encode(), digest_size=8)
    map_tensors(batch, lambda tensor: digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data))
    return int.from_bytes(digest.digest(), "little") >> 1


def disagreement(fingerprints: list[int], layout: Layout) -> str | None:
    """Describes the first mismatch between the ranks' data, as a clause; None if there is none.

    Args:
        fingerprints: of each rank's batch, by rank.
        layout: says which ranks are one replica.
    """
    replicas: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        replicas.setdefault(layout.coordinates(rank).dp, []).append(rank)
    usual: dict[int, int] = {}
    for replica, ranks in replicas.items():
        common, _ = Counter(fingerprints[rank] for rank in ranks).most_common(1)[0]
        for rank in ranks:
            if fingerprints[rank] != common:
                place = layout.coordinates(rank)
                named = f"dp {place.dp}, pp {place.pp}, tp {place.tp}" + (f", cp {place.cp}" if layout.cp > 1 else "")
                return (
                    f"rank {rank} ({named}) read other samples than the others "
                    "of its replica; give every host the same files at data.path"
                )
        if common in usual:
            return f"the replicas dp {usual[common]} and dp {replica} read the same samples; each must have its own"
        usual[common] = replica
    return None
