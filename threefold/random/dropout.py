"""Dropout layer whose masks do not depend on the layout (`random.dropout_mask`)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from threefold.random.dropout_mask import drop, factors
from threefold.random.rng import Positions, stream_key
from threefold.torch_private.runtime import Handle


class Dropout(nn.Module):
    """Dropout whose mask depends on the sample and the position, never on the rank or on earlier draws.

    Args:
        p: dropout probability of an element.
        name: name of this layer in the whole model; layers with different names have unrelated masks.
        parts: dim → local part of the whole activation; missing dims are whole.

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
        """Drop elements of `x` [B, …] by the samples' keys [B]; return `x` itself if nothing is dropped."""
        if keys is None or not self.draws(keys):
            return x
        if torch.compiler.is_compiling():
            return x * factors(x.detach(), keys, self.handle)
        return drop(x, keys, self.site, self.p, self.parts)

    def of_part(self, parts: Mapping[int, Positions]) -> "Dropout":
        """Return this layer for other parts of the activation."""
        return Dropout(self.p, self.name, parts)

    def extra_repr(self) -> str:
        return f"p={self.p}"
