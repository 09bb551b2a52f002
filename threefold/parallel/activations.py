"""What the forward pass keeps for the backward pass: counted, and by formula.

After Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section 4,
for the layers of this package: dropout keeps its mask in the activations' dtype, and attention without dropout keeps
only its inputs, its output and one number per row where torch's fused kernel serves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Attention = Literal["fused", "plain", "dropped"]
"""How the attention core computes: torch's fused kernel, plain products, or plain products with dropout."""


@dataclass(frozen=True)
class BlockSizes:
    """One transformer block and its part on a rank; positions are learned, and documents not kept apart.

    Attributes:
        samples: B of a micro-batch.
        positions: S of a sequence.
        hidden, heads, ffn: whole sizes; `tp` divides `heads` and `ffn`.
        itemsize: bytes of an activation's element.
        hidden_dropout: whether the block's two outputs are dropped from.
        attention: how its core computes.
        tp: ranks that share heads and features.
        cp: ranks that share the positions.
        sequence_parallel: whether the tensor ranks share the positions of what lies between the split layers too.
    """

    samples: int
    positions: int
    hidden: int
    heads: int
    ffn: int
    itemsize: int = 4
    hidden_dropout: bool = False
    attention: Attention = "fused"
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False


def block_bytes(sizes: BlockSizes, recompute: str = "none") -> int:
    """Bytes that one block keeps of one micro-batch between its forward and its backward pass.

    Exact on a CPU, but that the first context rank keeps the mask of one chunk fewer; a GPU keeps the two numbers per
    token of each norm in fp32.

    Args:
        sizes: of the block.
        recompute: as `train.recompute`, for a block that it treats.
    """
    tokens = sizes.samples * sizes.positions // sizes.cp
    own = tokens // sizes.tp if sizes.sequence_parallel else tokens  # between the split layers
    outer = own * sizes.hidden * sizes.itemsize
    if recompute == "full":
        return outer
    norms = 2 * (2 * outer + 2 * own * sizes.itemsize)  # the input and output of each, mean and deviation of each token
    inner = tokens * sizes.hidden // sizes.tp * sizes.itemsize
    core = 3 * inner if recompute == "selective" else _core_bytes(sizes, inner)  # queries, keys, values
    mlp = 2 * tokens * sizes.ffn // sizes.tp * sizes.itemsize  # before and after the GELU
    masks = 2 * outer if sizes.hidden_dropout else 0
    return norms + core + inner + mlp + masks  # inner: what attention hands to its projection


def _core_bytes(sizes: BlockSizes, inner: int) -> int:
    """What the attention core keeps, its inputs included; its output is kept by the projection after it.

    Args:
        sizes: of the block.
        inner: bytes of a rank's queries.
    """
    cp, length = sizes.cp, sizes.positions
    chunk = length // (2 * cp)
    keys = (2 * cp + 1) * chunk if cp > 1 else length  # seen by the two chunks of a context rank together
    pairs = keys * chunk if cp > 1 else length**2  # of query and key
    heads = sizes.samples * sizes.heads // sizes.tp
    if sizes.attention == "fused":
        sums = heads * length // cp * max(4, sizes.itemsize)  # the logarithm of each query's sum
        # With a context axis the gathered keys and values, the two chunks' own outputs and their masks.
        return 3 * inner + sums + (2 * cp * inner + inner + pairs * sizes.itemsize if cp > 1 else 0)
    dense = inner + 2 * inner * keys * cp // length  # copies, as a matrix product wants them
    weights = heads * pairs * sizes.itemsize
    # Dropped from: the weights before and after, the mask, and which keys come later.
    return dense + (weights if sizes.attention == "plain" else 3 * weights + pairs)


def head_bytes(sizes: BlockSizes, vocab: int, chunk_size: int = 0) -> int:
    """Bytes that the head keeps of one micro-batch between its forward and its backward pass.

    Exact on a CPU for the first tensor rank. While it computes the loss it has, for a moment, one or two chunks of its
    logits beside that, or with `chunk_size` 0 another copy or two of what it keeps of them.

    Args:
        sizes: of the blocks before it, whose heads and features do not matter.
        vocab: whole size of the vocabulary.
        chunk_size: as `train.loss_chunk_size`.
    """
    tokens = sizes.samples * sizes.positions // sizes.cp
    own = tokens // sizes.tp if sizes.sequence_parallel else tokens
    wide = max(4, sizes.itemsize)
    norm = 2 * own * sizes.hidden * sizes.itemsize + 2 * own * sizes.itemsize
    split = sizes.tp > 1
    labels = tokens * (8 + (2 if split else 0))
    if chunk_size:  # the largest logit and the sum of the exponentials; with tp the factor to the common maximum too
        return norm + labels + tokens * ((4 if split else 2) * wide + (0 if split else 1))
    probabilities = tokens * -(-vocab // sizes.tp) * wide
    return norm + labels + probabilities + (0 if split else wide)  # one number for the weight of all tokens together


@dataclass
class Saved:
    """The memory that autograd was given to keep; counted once however many tensors share it."""

    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # held, so that no other takes its place

    @property
    def nbytes(self) -> int:
        """What is held now: memory that was given back meanwhile (and is filled again when needed) does not count."""
        return sum(storage.nbytes() for storage in self._storages.values())


@contextmanager
def recording_saved(parameters: Iterable[Tensor]) -> Iterator[Saved]:
    """Count what the forward pass of a block keeps, the given parameters apart.

    Holds what it counts until the result is dropped.
    """
    known = {parameter.untyped_storage()._cdata for parameter in parameters}
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            saved.add(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
