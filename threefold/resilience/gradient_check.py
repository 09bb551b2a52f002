"""Silent corruption in gradients: a fast exact hash of a tensor's bits, and the comparison of replicas by it.

The hash is multilinear (Carter and Wegman, "Universal classes of hash functions", 1979; Lemire and Kaser, "Strongly
universal string hashing is fast", 2014): the tensor's bits, as words, are multiplied by odd 64-bit factors that depend
on their position, and summed modulo 2^64. Integer sums do not round, so the order of additions does not matter.
Changing one word always changes the hash, as an odd factor keeps every bit of the difference; swapping words goes
unnoticed in about one case of 2^32. The hash protects against hardware faults, not against an attacker.

The factor of a word is the factor of its row times that of its column in a table of `_COLUMNS` columns. The table stays
small, and only one factor per row is computed, by splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.comm.layout import Layout
from threefold.data.loader import Loader
from threefold.models.layers.experts import Routing
from threefold.random.rng import draws_in_sequence, signed
from threefold.train.step import Engine

_COLUMNS = 1 << 12
_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Words whose products are in memory at once; on a CPU few enough for a core's cache."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
"""Word type by bytes per element: at most 32 bits, so that a change of the top bits still depends on the factor."""


class BitHash:
    """Hash of a tensor's bits, computed on `device`; small tensors on another device are copied to it.

    Equal bits have equal hashes on every device. Equal values with different bits (0 and -0) have different hashes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns = factors(1 << 40, _COLUMNS, device)  # far from the positions of rows
        self._at_once = _AT_ONCE.get(device.type, _COLUMNS)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hash a tensor's bits in the order of its elements, as an int64 scalar."""
        words = tensor.detach().to(self._device).reshape(-1).view(_WORDS[tensor.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        whole = words.numel() - words.numel() % _COLUMNS
        for start in range(0, whole, self._at_once):
            part = words[start : min(whole, start + self._at_once)]
            rows = (part.view(-1, _COLUMNS) * self._columns).sum(1)
            total += (rows * factors(start // _COLUMNS, len(rows), words.device)).sum()
        rest = words[whole:]
        if rest.numel():
            total += (rest * self._columns[: rest.numel()]).sum() * factors(whole // _COLUMNS, 1, words.device)[0]
        return total


def combined(hashes: Tensor) -> Tensor:
    """Combine hashes, int64 [n], into one int64 scalar that depends on their order."""
    return (hashes * factors(0, len(hashes), hashes.device)).sum()


def factors(start: int, count: int, device: torch.device) -> Tensor:
    """Return the odd factors of `count` positions from `start` on, int64 [count]."""
    mixed = torch.arange(start + 1, start + count + 1, device=device) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


_GOLDEN, _FIRST, _SECOND = (
    signed(constant, 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True)
class Disagreement:
    """Ranks that computed different gradients of the same samples.

    Attributes:
        ranks: the rank at fault, or several suspects, one of which is.
        others: ranks that computed the same samples without them.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]


class GradientCheck:
    """Bit-exact comparison of a step's gradients with those that another replica computes from the same samples.

    Without another replica, a rank computes its own gradients twice. It also does so for layers that draw random
    numbers in sequence, and for experts, as their results depend on the samples of other replicas too. All methods are
    collective over the world.
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
        """Compute the next replica's gradients of update `step`, then observe the step's own gradients."""
        self._checked = self._computed(self._next, step)
        self._observe()

    def compare(self, step: int) -> Disagreement | None:
        """Compare the gradients once the step's own have been computed; None if they agree."""
        own, replica = self._observed(), self._engine.mesh.dp.index
        table, layout = self._exchanged(own, self._checked), self._engine.mesh.layout
        pairs = []  # (checker, owner) of hashes of the owner's gradients that differ
        for checker, (_, checked) in enumerate(table):
            place = layout.coordinates(checker)
            owner = layout.rank_of(**place._replace(dp=(place.dp + self._shift) % layout.dp)._asdict())
            if table[owner][0] != checked:
                pairs.append((checker, owner))
        if not pairs:
            return None
        again = self._exchanged(self._computed(replica, step), self._computed(self._next, step))
        unstable = [rank for rank, (before, now) in enumerate(zip(table, again, strict=True)) if before != now]
        return disagreement(pairs, unstable, layout)

    def _exchanged(self, own: Tensor, checked: Tensor) -> list[list[int]]:
        row = torch.stack([own, checked]).view(1, 2)
        found: list[list[int]] = self._engine.mesh.world.all_gather_equal(row, 0).tolist()
        return found

    def _computed(self, replica: int, step: int) -> Tensor:
        """Return the hash of this rank's part of the gradients of a replica's samples."""
        loader = self._loader.of_replica(replica)
        self._observe()
        with self._engine.preserved():
            rows = torch.from_numpy(loader.share.rows)
            self._engine.compute_gradients(loader.batch(step - 1), step - 1, rows=rows)
        return self._observed()

    def _observe(self) -> None:
        def add(gradients: Tensor) -> None:
            self._sum = self._sum + self._hash(gradients)

        self._sum = torch.zeros_like(self._sum)
        self._engine.gradients.observe(add)

    def _observed(self) -> Tensor:
        self._engine.gradients.observe(None)
        return self._sum


def disagreement(pairs: Sequence[tuple[int, int]], unstable: Sequence[int], layout: Layout) -> Disagreement:
    """Find the ranks at fault, from the (checker, owner) pairs that disagree (at least one).

    Ranks are `unstable` if their second computation gave different results.
    """
    everyone = {rank for pair in pairs for rank in pair}
    if unstable:
        ranks = set(unstable)
    else:  # a replica that is always wrong disagrees with the replica it checks and with its checker
        replica = {rank: layout.coordinates(rank).dp for rank in everyone}
        met = {frozenset((replica[checker], replica[owner])) for checker, owner in pairs}
        times = Counter(place for pair in met for place in pair)
        most = max(times.values())
        ranks = {rank for rank in everyone if times[replica[rank]] == most}
    return Disagreement(tuple(sorted(ranks)), tuple(sorted(everyone - ranks)))
