"""Fingerprint of a model's weights: a short hash of every element, the same in every layout.

A tensor's hash is multilinear, like that of `threefold.resilience.corruption`: the bits of each element, as words of at
most 32 bits, are multiplied by an odd 64-bit factor that depends on the element's position in the whole, unsharded
tensor, and summed modulo 2^64. Integer sums do not round, so the hashes of the parts that ranks hold add up to that of
the whole, however it is cut and in whatever order. Changing one element always changes the hash. The factor is that of
the row times that of the column, so a part needs one factor per row and one per column, computed once.

The fingerprint mixes the hash of each tensor with its name, and sums over the tensors. It finds mistakes and faults,
and does not protect against an attacker. 0 and -0 count as equal.

On one core, an element of fp32 takes one and a half nanoseconds, of which the 64-bit product is more than half; sums of
products in fp64 are no faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

import torch
from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.parallel.parameter import Weight, offset
from threefold.random.rng import Slice, row_major, signed, stream_key

WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
"""Word type by bytes per element: at most 32 bits, so that a change of the top bits still depends on the factor."""
_COLUMNS: Final = 1 << 16  # length of the table of column factors; longer rows are hashed in blocks of this length
_AT_ONCE: Final = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Words of a core, or of a GPU, whose products are in memory at once: few enough for a core's cache."""
_ROWS_FROM, _COLUMNS_FROM, _BLOCKS_FROM = 0, 1 << 60, 1 << 61
"""Positions from which factors of rows, of columns and of blocks of columns are drawn, far from one another."""
_DIGITS: Final = 12


def odd_factors(positions: Tensor) -> Tensor:
    """Return the odd 64-bit factor of each position: splitmix64 (Steele, Lea and Flood, OOPSLA 2014). int64 [n]."""
    return _mixed((positions + 1) * _GOLDEN) | 1


def _mixed(values: Tensor) -> Tensor:
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        shifted = (values >> bits) & ((1 << (64 - bits)) - 1)  # with zeros from the left
        values = (values ^ shifted) * factor
    return values


_GOLDEN, _FIRST, _SECOND = (
    signed(constant, 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@lru_cache(maxsize=4)
def _column_factors(device: torch.device) -> Tensor:
    return odd_factors(torch.arange(_COLUMNS_FROM, _COLUMNS_FROM + _COLUMNS, device=device))


@lru_cache(maxsize=1 << 10)
def _block_factor(block: int) -> int:
    return int(odd_factors(torch.tensor(_BLOCKS_FROM + block)))


class PartHash:
    """Hash of a part of a tensor. The hashes of parts that make up the whole add up, modulo 2^64, to that of the whole.

    The part has a `shape`, and a `start` per dim in a tensor of the shape `whole`.
    """

    def __init__(
        self, shape: Sequence[int], start: Sequence[int], whole: Sequence[int], device: torch.device | None = None
    ) -> None:
        device = device or torch.device("cpu")
        rows = [Slice(first, size) for first, size in zip(start[:-1], whole[:-1], strict=True)]
        self._shape = (prod(shape[:-1]), shape[-1] if shape else 1)
        self._first = start[-1] if start else 0
        self._rows = odd_factors(_ROWS_FROM + row_major(shape[:-1], rows, device))
        cores = torch.get_num_threads() if device.type == "cpu" else 1
        self._at_once = cores * _AT_ONCE.get(device.type, 1 << 15)

    def __call__(self, part: Tensor) -> Tensor:
        """Hash the part. int64 scalar."""
        found = part.detach()
        total = torch.zeros((), dtype=torch.int64, device=found.device)
        if not found.numel():
            return total
        if found.is_complex():
            found = torch.view_as_real(found)
        matrix = found.reshape(self._shape[0], -1)
        word = WORDS[matrix.element_size()]
        words = matrix.element_size() // word.itemsize
        first = self._first * (matrix.shape[1] // self._shape[1]) * words
        end = first + matrix.shape[1] * words
        for block in range(first // _COLUMNS, -(-end // _COLUMNS)):
            begin = block * _COLUMNS
            low, high = max(first, begin), min(end, begin + _COLUMNS)
            columns = matrix[:, (low - first) // words : (high - first) // words]
            sums = self._row_sums(columns, word, _column_factors(found.device)[low - begin : high - begin])
            total += sums.mul_(self._rows).sum() * _block_factor(block)
        return total

    def _row_sums(self, columns: Tensor, word: torch.dtype, factors: Tensor) -> Tensor:
        """Return the sum of each row's words times their factors. int64 [rows]."""
        rows = min(len(columns), max(1, self._at_once // len(factors)))
        plain = torch.empty(rows, columns.shape[1], dtype=columns.dtype, device=columns.device)
        products = torch.empty(rows, len(factors), dtype=torch.int64, device=columns.device)
        sums = []
        for part in columns.split(rows):
            torch.add(part, 0, out=plain[: len(part)])  # -0 becomes 0
            of_part = products[: len(part)]
            sums.append(of_part.copy_(plain[: len(part)].view(word)).mul_(factors).sum(1))
        return torch.cat(sums)


@dataclass(frozen=True)
class TensorHashes:
    """Hashes of tensors, each of the whole tensor, by name."""

    by_name: dict[str, int]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all tensors together: 12 hexadecimal digits."""
        keys = torch.tensor([stream_key("fingerprint", name) for name in self.by_name], dtype=torch.int64)
        mixed = _mixed(torch.tensor(list(self.by_name.values()), dtype=torch.int64) ^ keys)
        total = int(mixed.sum()) & ((1 << 64) - 1)
        return f"{total >> (64 - 4 * _DIGITS):0{_DIGITS}x}"


class Fingerprints:
    """Hashes of the weights of a model that is sharded over a mesh. All methods are collective over the world.

    Each element is hashed by one of the ranks that hold it. Each `turn` takes the next of these ranks, so that a rank
    whose copy differs is found in time, and the ranks share the work.
    """

    def __init__(self, weights: Sequence[Weight], mesh: Mesh) -> None:
        self._weights, self._mesh = weights, mesh
        self._hashes: dict[str, PartHash] = {}
        self._names: dict[str, int] = {}
        self._holders: dict[str, list[int]] = {}

    def take(self, turn: int) -> TensorHashes:
        """Hash the weights as they are now; equal on every rank. The first call finds out which ranks hold what."""
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
        return TensorHashes(dict(zip(self._names, totals.tolist(), strict=True)))
