"""Hash of a tensor's elements that adds up over its parts: multilinear, with a factor for each position.

The bits of each element, as words of at most 32 bits, are multiplied by an odd 64-bit factor that depends on the
element's position in the whole, unsharded tensor, and summed modulo 2^64 (Carter and Wegman, "Universal classes of
hash functions", 1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Integer sums do not round,
so the hashes of the parts that ranks hold add up to that of the whole, however it is cut and in whatever order.
Changing one element always changes the hash, as an odd factor keeps every bit of the difference; swapping two goes
unnoticed in about one case of 2^32. The factor is that of the row times that of the column, so a part needs one factor
per row and one per column, computed once. The hash finds mistakes and faults, and does not protect against an attacker.

On one core, an element of fp32 takes one and a half nanoseconds, of which the 64-bit product is more than half; sums of
products in fp64 are no faster.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Final

import torch
from torch import Tensor

from threefold.random.rng import Slice, row_major, signed, stream_key

WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
"""Word type by bytes per element: at most 32 bits, so that a change of the top bits still depends on the factor."""
_COLUMNS: Final = 1 << 16  # length of the table of column factors; longer rows are hashed in blocks of this length
_AT_ONCE: Final = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Words of a core, or of a GPU, whose products are in memory at once: few enough for a core's cache."""
_ROWS_FROM, _COLUMNS_FROM, _BLOCKS_FROM = 0, 1 << 60, 1 << 61
"""Positions from which factors of rows, of columns and of blocks of columns are drawn, far from one another."""
_DIGITS: Final = 12  # of a fingerprint


def odd_factors(positions: Tensor) -> Tensor:
    """Return the odd 64-bit factor of each position: splitmix64 (Steele, Lea and Flood, OOPSLA 2014). int64 [n]."""
    return mixed((positions + 1) * _GOLDEN) | 1


def mixed(values: Tensor) -> Tensor:
    """Return int64 values whose bits each depend on all bits of the value given."""
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

    The part has a `shape`, and a `start` per dim in a tensor of the shape `whole`. 0 and -0 count as equal, other than
    in float8, with which torch does not compute.
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
            if part.is_floating_point() and part.element_size() > 1:
                part = torch.add(part, 0, out=plain[: len(part)])  # -0 becomes 0
            sums.append(products[: len(part)].copy_(part.view(word)).mul_(factors).sum(1))
        return torch.cat(sums)


def hash_of_part(part: Tensor, shape: Sequence[int], start: Sequence[int], whole: Sequence[int]) -> int:
    """Return the hash of a part as a number, see `PartHash`."""
    return int(PartHash(shape, start, whole)(part))


def fingerprint_of(hashes: Mapping[str, int]) -> str:
    """Return the fingerprint of a model, 12 hexadecimal digits that are the same in every layout.

    The hash of each weight (`PartHash`), by name, is mixed with the name, and the sum is taken over the weights.
    """
    keys = torch.tensor([stream_key("fingerprint", name) for name in hashes], dtype=torch.int64)
    values = torch.tensor([signed(each, 64) for each in hashes.values()], dtype=torch.int64)
    total = int(mixed(values ^ keys).sum()) & ((1 << 64) - 1)
    return f"{total >> (64 - 4 * _DIGITS):0{_DIGITS}x}"
