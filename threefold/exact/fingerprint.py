"""Hashes of the weights of a model that is sharded over a mesh, which give its fingerprint (`exact.tensor_hash`)."""

from collections.abc import Sequence

import torch

from threefold.comm.mesh import Mesh
from threefold.exact.tensor_hash import PartHash
from threefold.parallel.parameter import Weight, offset


class WeightHashes:
    """Hashes of the weights of a model that is sharded over a mesh. All methods are collective over the world.

    Each element is hashed by one of the ranks that hold it. Each `turn` takes the next of these ranks, so that a rank
    whose copy differs is found in time, and the ranks share the work.
    """

    def __init__(self, weights: Sequence[Weight], mesh: Mesh) -> None:
        self._weights, self._mesh = weights, mesh
        self._hashes: dict[str, PartHash] = {}
        self._names: dict[str, int] = {}
        self._holders: dict[str, list[int]] = {}

    def take(self, turn: int) -> dict[str, int]:
        """Return the hash of each whole weight as it is now, by name; equal on every rank.

        The first call finds out which ranks hold what.
        """
        if not self._names:
            held = {each.name: (offset(each.parameter), tuple(each.master.shape)) for each in self._weights}
            everywhere = self._mesh.world.gather_objects(held)
            names = dict.fromkeys(name for ranks in everywhere for name in ranks)
            self._names = {name: place for place, name in enumerate(names)}
            for weight in self._weights:
                start, shape = part = held[weight.name]
                self._holders[weight.name] = [
                    rank for rank, has in enumerate(everywhere) if has.get(weight.name) == part
                ]
                self._hashes[weight.name] = PartHash(shape, start, weight.parameter.shape, weight.master.device)
        totals = torch.zeros(len(self._names), dtype=torch.int64, device=self._mesh.device)
        for weight in self._weights:
            place, holders = self._names[weight.name], self._holders[weight.name]
            if holders[(place + turn) % len(holders)] == self._mesh.rank:
                totals[place] = self._hashes[weight.name](weight.master)
        self._mesh.world.all_reduce_(totals)
        return dict(zip(self._names, totals.tolist(), strict=True))
