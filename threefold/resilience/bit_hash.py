"""Hash of a tensor's bits, in which 0 and -0 differ, and of several hashes in their order."""

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from threefold.exact.tensor_hash import WORDS, PartHash, odd_factors

_BITS_IN_A_ROW: Final = 1 << 12  # words of a row in which the bits of a tensor without a place of its own are hashed


def bit_hash(tensor: Tensor, device: torch.device) -> Tensor:
    """Hash a tensor's bits in the order of its elements, computed on `device`; 0 and -0 differ. int64 scalar."""
    words = tensor.detach().to(device).reshape(-1).view(WORDS[tensor.element_size()])
    end = len(words) - len(words) % _BITS_IN_A_ROW
    of_rows, of_rest = _bit_hashes(len(words), device)
    if not end:
        return of_rest(words)
    return of_rows(words[:end]) + of_rest(words[end:])


@lru_cache(maxsize=1 << 10)
def _bit_hashes(words: int, device: torch.device) -> tuple[PartHash, PartHash]:
    """Return the hashes of whole rows of words and of the rest, parts of a matrix with one row more."""
    rows, rest = divmod(words, _BITS_IN_A_ROW)
    whole = (rows + 1, _BITS_IN_A_ROW)
    return PartHash((rows, _BITS_IN_A_ROW), (0, 0), whole, device), PartHash((1, rest), (rows, 0), whole, device)


def combined(hashes: Tensor) -> Tensor:
    """Combine hashes, int64 [n], into one int64 scalar that depends on their order."""
    return (hashes * odd_factors(torch.arange(len(hashes), device=hashes.device))).sum()
