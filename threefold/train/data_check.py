"""Whether the ranks read what they should: one replica's the same, two replicas' different samples."""

from collections import Counter
from typing import TYPE_CHECKING

import torch

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.resolve import is_derived, with_micro_batch
from threefold.data.loader import fingerprint
from threefold.errors import UserError
from threefold.train.callbacks.base import Callback

if TYPE_CHECKING:
    from threefold.data.loader import Batch


def agree_on_micro_batch(config: Config, mesh: Mesh) -> Config:
    """Where the micro-batch is the default, take the smallest that any rank has: under a launcher each of them works it
    out from the memory of its own machine. A collective.

    Args:
        config: resolved.
        mesh: this rank's place.
    """
    if not is_derived(config, "train.micro_batch_size"):
        return config
    # A sum in which each rank has a place of its own: every backend has it.
    sizes = torch.zeros(mesh.world.size, dtype=torch.int64, device=mesh.device)
    sizes[mesh.rank] = config.train.micro_batch_size
    smallest = int(mesh.world.all_reduce_(sizes).min())
    return config if smallest == config.train.micro_batch_size else with_micro_batch(config, smallest)


class DataCheck(Callback):
    """Compares the ranks' batches at the first step and every so many; a run whose data is mixed up ends there.

    On every rank: a collective.

    Args:
        mesh: this rank's place.
        every: steps between comparisons.

    Raises:
        UserError: on every rank, naming the one that reads something else.
    """

    def __init__(self, mesh: Mesh, every: int) -> None:
        self.mesh, self.every = mesh, every
        self._compared = False

    def before_step(self, step: int, batch: "Batch") -> None:
        if self.mesh.world.size == 1 or (self._compared and step % self.every):
            return
        self._compared = True
        # A sum in which each rank has a place of its own: cheaper than gathering on every backend.
        table = torch.zeros(self.mesh.world.size, dtype=torch.int64, device=self.mesh.device)
        table[self.mesh.rank] = fingerprint(batch)
        found = self.mesh.world.all_reduce_(table).tolist()
        if problem := disagreement(found, self.mesh.layout):
            raise UserError(f"At step {step} {problem}.")


def disagreement(fingerprints: list[int], layout: Layout) -> str | None:
    """What is wrong with the ranks' data, as the main part of a sentence; None if nothing is.

    Args:
        fingerprints: of each rank's batch, by rank.
        layout: who should read the same.
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
