"""A step's gradients computed again, on another rank: finds arithmetic that is wrong without an error.

A wrong gradient reaches all ranks alike through the sum over the replicas, so no copy of the weights differs. Here each
replica also computes the gradients of the next replica's samples, and hashes of both, taken before the sum, have to be
equal: the same samples, weights and operations give the same bits. Where they are not, both are computed once more,
which tells a rank that computes differently each time from one that always computes wrong. Megatron-LM reruns a step on
the same rank and, after a restart, on another (`--rerun-mode validate_results`), when a loss is suspicious.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.comm.layout import Layout
from threefold.data.loader import Loader
from threefold.models.layers.router import Routing
from threefold.random.rng import draws_in_sequence
from threefold.train.corruption.bit_hash import BitHash
from threefold.train.engine import Engine


@dataclass(frozen=True)
class Disagreement:
    """Ranks that computed other gradients of the same samples than others did.

    Attributes:
        ranks: at fault, or those of which one is where there are several.
        others: those that computed the same without them.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]


class GradientCheck:
    """Compares the gradients of a step, bit for bit, with those that another replica computes.

    Without another replica a rank computes its own gradients twice instead; so it does with layers that draw random
    numbers in sequence, and with experts, where what a rank computes depends on the samples of other replicas too.

    Collective over the world, as its methods.

    Args:
        engine: computes the gradients.
        loader: of this replica.
    """

    def __init__(self, engine: Engine, loader: Loader) -> None:
        self._engine, self._loader = engine, loader
        self._hash = BitHash(engine.mesh.device)
        layout = engine.mesh.layout
        bound = any(draws_in_sequence(module) or isinstance(module, Routing) for module in engine.model.modules())
        somewhere = engine.mesh.world.all_reduce_max_(torch.tensor([int(bound)], device=engine.mesh.device))
        self._shift = 0 if bool(somewhere) else 1
        self._next = (engine.mesh.dp.index + self._shift) % layout.dp
        self._sum = torch.zeros((), dtype=torch.int64, device=engine.mesh.device)
        self._checked = self._sum

    def before_forward(self, step: int) -> None:
        """Compute the gradients of the next replica's samples, and observe the step's own, which come next.

        Args:
            step: the number of the update that comes, 1 for the first.
        """
        self._checked = self._computed(self._next, step)
        self._observe()

    def compare(self, step: int) -> Disagreement | None:
        """Compare, when the step's own gradients have been computed; None where they agree."""
        own, replica = self._observed(), self._engine.mesh.dp.index
        table = self._exchanged(own, self._checked)
        pairs = disagreeing(table, self._engine.mesh.layout, self._shift)
        if not pairs:
            return None
        again = self._exchanged(self._computed(replica, step), self._computed(self._next, step))
        unstable = [rank for rank, (before, now) in enumerate(zip(table, again, strict=True)) if before != now]
        return disagreement(pairs, unstable, self._engine.mesh.layout)

    def _exchanged(self, own: Tensor, checked: Tensor) -> list[list[int]]:
        """The two hashes of each rank."""
        row = torch.stack([own, checked]).view(1, 2)
        found: list[list[int]] = self._engine.mesh.world.all_gather_equal(row, 0).tolist()
        return found

    def _computed(self, replica: int, step: int) -> Tensor:
        """The hash of this rank's part of the gradients of a replica's samples."""
        loader = self._loader.of_replica(replica)
        self._observe()
        with self._engine.preserved():
            rows = torch.from_numpy(loader.share.rows)
            self._engine.compute_gradients(loader.batch(step - 1), step - 1, rows=rows)
        return self._observed()

    def _observe(self) -> None:
        self._sum = torch.zeros_like(self._sum)
        self._engine.gradients.observe(self._add)

    def _observed(self) -> Tensor:
        self._engine.gradients.observe(None)
        return self._sum

    def _add(self, gradients: Tensor) -> None:
        self._sum = self._sum + self._hash(gradients)


def disagreeing(table: Sequence[Sequence[int]], layout: Layout, shift: int) -> list[tuple[int, int]]:
    """The pairs (checker, owner) of ranks whose hashes of the owner's gradients differ.

    Args:
        table: by rank, the hash of its own gradients and of those it has checked.
        layout: of the ranks.
        shift: a replica checks the one that comes so many after it.
    """
    pairs = []
    for checker, (_, checked) in enumerate(table):
        place = layout.coordinates(checker)
        owner = layout.rank_of(**place._replace(dp=(place.dp + shift) % layout.dp)._asdict())
        if table[owner][0] != checked:
            pairs.append((checker, owner))
    return pairs


def disagreement(pairs: Sequence[tuple[int, int]], unstable: Sequence[int], layout: Layout) -> Disagreement:
    """Who is at fault.

    Args:
        pairs: (checker, owner) that disagree, at least one.
        unstable: ranks that computed something else the second time.
        layout: of the ranks.
    """
    everyone = {rank for pair in pairs for rank in pair}
    if unstable:
        ranks = set(unstable)
    else:  # a replica that always computes wrong disagrees with the one that it checks and the one that checks it
        replica = {rank: layout.coordinates(rank).dp for rank in everyone}
        met = {frozenset((replica[checker], replica[owner])) for checker, owner in pairs}
        times = Counter(place for pair in met for place in pair)
        most = max(times.values())
        ranks = {rank for rank in everyone if times[replica[rank]] == most}
    return Disagreement(tuple(sorted(ranks)), tuple(sorted(everyone - ranks)))
