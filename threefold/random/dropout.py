"""Dropout whose masks do not depend on the layout.

A mask is a pure function of the seed, the step, the sample, the layer and each element's position in the *whole*
activation. A rank thus drops exactly what one process would drop in its part, and recomputed activations are equal.

Sources: SplitMix64's finalizer, Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014); the
32-bit mixer, Wellons, "lowbias32" (2018).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from threefold.random.rng import ALL, Positions, row_major, signed, stream_key
from threefold.torch_private.runtime import Handle, operator

_MASK32 = 0xFFFFFFFF


class Dropout(nn.Module):
    """Dropout whose mask depends on the sample and the position, never on the rank or on earlier draws.

    Args:
        p: dropout probability of an element.
        name: name of this layer in the whole model; layers with different names have unrelated masks.
        parts: dim → local part of the whole activation; missing dims are whole. Of a model of your own it follows from
            the layers before this one, and is set before the first step.

    Attributes:
        site: random stream of this layer.
        handle: opaque reference to this layer, for operators of compiled code.

    Example:
        >>> dropout = threefold.Dropout(0.1, "blocks.0.dropout")
        >>> keys = threefold.sample_keys(seed=0, step=5, rows=torch.arange(4))
        >>> x = dropout(x, keys)  # x [4, …]
    """

    def __init__(self, p: float, name: str = "", parts: Mapping[int, Positions] | None = None) -> None:
        super().__init__()
        self.p, self.name, self.parts = p, name, parts or {}
        self.site = stream_key("site", name) if name else 0
        self.handle = Handle(self)

    def draws(self, keys: Tensor | None) -> bool:
        """Return whether anything is dropped: only in training, with keys and a positive probability."""
        return self.training and keys is not None and self.p > 0

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Drop elements of `x` [B, …] by the samples' keys [B]; return `x` itself if nothing is dropped.

        In evaluation, `samples.keys` of a layer's `forward` is None, so that nothing is dropped.
        """
        if keys is None or not self.draws(keys):
            return x
        if torch.compiler.is_compiling():
            return x * factors(x.detach(), keys, self.handle)
        return drop(x, keys, self.site, self.p, self.parts)

    def place(self, parts: Mapping[int, Positions]) -> None:
        """Set the parts of the activation that this layer gets, which a first batch shows."""
        self.parts = parts

    def of_part(self, parts: Mapping[int, Positions]) -> "Dropout":
        """Return this layer for other parts of the activation."""
        return Dropout(self.p, self.name, parts)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def sample_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """Return a 64-bit key for each sample of a step, which determines its dropout masks.

    Args:
        seed: seed of the run.
        step: optimizer step.
        rows: int64 [B], row of each sample in the global batch.

    Returns:
        int64 [B].

    Example:
        >>> keys = threefold.sample_keys(seed=0, step=5, rows=torch.arange(4))
    """
    return _mix64(rows.to(torch.int64) * signed(0x9E3779B97F4A7C15, 64) + stream_key("dropout", seed, step))


def keep_mask(
    keys: Tensor, site: int, shape: torch.Size, p: float, parts: Mapping[int, Positions] | None = None
) -> Tensor:
    """Return which elements of an activation of `shape` [B, …, n] survive dropout: bool, of `shape`.

    The mask is a function of each sample's key int64 [B], the layer's `site` (`stream_key`), and the element's position
    in the sample's whole activation, of which `parts` are local by dim; missing dims are whole.
    """
    rows, columns = _places(shape, parts or {}, keys.device)
    return _keep(keys, site, p, rows, columns)


def drop(x: Tensor, keys: Tensor, site: int, p: float, parts: Mapping[int, Positions]) -> Tensor:
    """Zero the elements of `x` that `keep_mask` drops, and scale the others to preserve the mean."""
    return drop_rows(x, keys, site, p, *_places(x.shape, parts, keys.device))


def drop_rows(x: Tensor, keys: Tensor, site: int, p: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply `drop` with positions in the whole activation: row-major `rows`, but for the last dim, and `columns`."""
    return x * _keep(keys, site, p, rows, columns).to(x.dtype).mul_(1 / (1 - p))


def _places(shape: torch.Size, parts: Mapping[int, Positions], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the `rows` and `columns` of `drop_rows` for an activation of `shape` [B, …, n]."""
    held = [parts.get(dim, ALL) for dim in range(len(shape))]
    rows = row_major(shape[1:-1], held[1:-1], device).view(shape[1:-1])
    return rows, held[-1].indices(shape[-1], device)


def _keep(keys: Tensor, site: int, p: float, rows: Tensor, columns: Tensor) -> Tensor:
    samples = keys.view(-1, *(1,) * rows.dim())
    row_keys = _mix64(samples + site + rows * signed(0x9E3779B97F4A7C15, 64))
    # Strong mixing once per row, then a cheap 32-bit mix per element, because this runs on every activation.
    return _mix32(columns.to(torch.int32), row_keys.unsqueeze(-1)) >= min(round(p * 2**32) - 2**31, 2**31 - 1)


# An operator, because compilers break wrapping integers: C++ may assume that they never overflow, and torch folds
# products of positions in unbounded integers.
@operator("dropout_factors", lambda x, keys, layer: torch.empty_like(x, memory_format=torch.contiguous_format))
def factors(x: Tensor, keys: Tensor, layer: Handle) -> Tensor:
    dropout: Dropout = layer.value
    kept = keep_mask(keys, dropout.site, x.shape, dropout.p, dropout.parts)
    return kept.to(x.dtype).mul_(1 / (1 - dropout.p))


def _mix64(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64: a bijection whose every output bit depends on every input bit."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix32(column: Tensor, row_key: Tensor) -> Tensor:
    """Draw a uniform int32 for each element, from its column and its row's 64-bit key."""
    low, high = _low_word(row_key), _low_word(row_key >> 32)
    x = (column ^ low).mul_(signed(0x7FEB352D, 32))
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += high
    x *= signed(0x846CA68B, 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= signed(0x9E3779B1, 32)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    return x


def _low_word(x: Tensor) -> Tensor:
    """Return the low 32 bits as int32, wrapping (casting an out-of-range value is undefined on some devices)."""
    return (((x + 2**31) & _MASK32) - 2**31).to(torch.int32)
