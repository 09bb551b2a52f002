"""Attention inside documents and windows by torch's fused kernel for sequences of different lengths, on a GPU."""

from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from threefold.ops.tiles import Sight, document_bounds

_DTYPES: Final = (torch.bfloat16, torch.float16)
_WIDEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8
_CAPABILITY: Final = (8, 0)  # Ampere


class Lengths(NamedTuple):
    """The documents of all samples, one after the other.

    Attributes:
        queries, keys: int32 [documents + 1], where the queries and keys of each begin, and where the last ends.
        most_queries, most_keys: of a document.
        window: as of `Sight`.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    window: int


def varlen_serves(q: Tensor) -> bool:
    """Whether the kernel takes queries [B, Q, heads, d]: 16-bit floats on a GPU since Ampere. It has no fp32."""
    if not q.is_cuda or q.dtype not in _DTYPES:
        return False
    fits = q.shape[-1] <= _WIDEST_HEAD and q.shape[-1] % _HEAD_MULTIPLE == 0
    return fits and torch.cuda.get_device_capability(q.device) >= _CAPABILITY


@torch.compiler.disable  # compiled code would be compiled anew for the documents of every batch
def varlen_lengths(q: Tensor, k: Tensor, sight: Sight) -> Lengths | None:
    """The documents of the last Q of K positions, on the device of `q`; None where the parts of a document lie apart,
    which the kernel cannot say.

    Args:
        q: [B, Q, heads, d].
        k: [B, K, key-value heads, d].
        sight: what hides keys.
    """
    keys = k.shape[1]
    ends_q, ends_k, most_q, most_k = [0], [0], 0, 0
    for bounds in document_bounds(len(q), keys, sight.documents):
        if bounds is None:
            return None
        for begin, end in pairwise(bounds):
            count_q = max(0, end - max(begin, keys - q.shape[1]))
            ends_q.append(ends_q[-1] + count_q)
            ends_k.append(ends_k[-1] + end - begin)
            most_q, most_k = max(most_q, count_q), max(most_k, end - begin)
    # Both in one copy, from pinned memory, for which the host does not wait.
    both = torch.tensor([ends_q, ends_k], dtype=torch.int32, pin_memory=q.is_cuda).to(q.device, non_blocking=True)
    of_queries, of_keys = both
    return Lengths(of_queries, of_keys, most_q, most_k, sight.window)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
    """As `ops.attention.attention`, for what `varlen_serves`.

    Returns:
        [B, Q, heads · d].
    """
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler

    out = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        window_size=(lengths.window - 1, 0),  # how many keys before and after its own; −1 for all
        enable_gqa=q.shape[2] != k.shape[2],
    )
    assert isinstance(out, Tensor)  # nothing else is asked for
    return out.view(*q.shape[:2], -1)
