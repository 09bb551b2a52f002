"""A fast exact hash of a tensor's bits, computed on its device.

Multilinear hashing (Carter and Wegman, "Universal classes of hash functions", 1979; Lemire and Kaser, "Strongly
universal string hashing is fast", 2014): the tensor's bits as words, each times an odd 64-bit factor that follows from
its position, summed modulo 2^64. Integer sums have no rounding, so no order of the additions changes the result. One
word that changed always changes the hash, as an odd factor keeps every bit of the difference; words that changed places
change it but for one case in about 2^32. It protects against what hardware does, not against an attacker.

The factor of a word is that of its row times that of its column in a table of `_COLUMNS` columns, so that the table is
small and only one factor for each row is computed: by splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

import torch
from torch import Tensor

from threefold.random.keys import signed

_COLUMNS = 1 << 12
_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Words whose products are in memory at once: on a CPU few enough for a core's cache."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
"""By bytes of an element: its bits in words of 32 bits at most, so that a difference in their upper bits alone leaves
room for the factors to differ in."""


class BitHash:
    """Hashes tensors on a device.

    Equal bits have equal hashes on every device. Values that are equal but not in their bits (0 and -0) differ.

    Args:
        device: of all tensors but small ones, which are copied to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns = factors(1 << 40, _COLUMNS, device)  # far from the positions of rows
        self._at_once = _AT_ONCE.get(device.type, _COLUMNS)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The hash of a tensor's bits in the order of its elements.

        Args:
            tensor: of any shape and dtype.

        Returns:
            int64 scalar.
        """
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
    """One hash of several, which depends on their order.

    Args:
        hashes: int64 [n].

    Returns:
        int64 scalar.
    """
    return (hashes * factors(0, len(hashes), hashes.device)).sum()


def factors(start: int, count: int, device: torch.device) -> Tensor:
    """The odd factors of the positions from `start` on: int64 [count]."""
    mixed = torch.arange(start + 1, start + count + 1, device=device) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifted to the right, with zeros from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


_GOLDEN, _FIRST, _SECOND = (
    signed(constant, 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
