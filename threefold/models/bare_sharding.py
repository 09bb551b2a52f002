"""The sharding rule of a parameter or a buffer that is cut by itself, in whatever module it is."""

from collections.abc import Mapping
from dataclasses import dataclass

from threefold.models.sharding import HEADS, Cut, Split, Unit


@dataclass(frozen=True)
class Shard(Split):
    """A bare parameter or a buffer of which each rank of the tensor axis has a part along `dim`, such as a factor for
    each head or for each feature of a `Column` layer. The module reads its part, as it sees its part of that layer's
    output. A buffer is registered with `persistent=False`, and each part is cut from what the constructor computes.

    Args:
        dim: of the parameter or buffer.
        heads: how many heads (or other units of equal width) that dim is, as of the `Column` layers around; 0 where it
            may be cut anywhere. The tensor axis has to divide it.

    Example:
        >>> plan = threefold.Plan(
        ...     layers=["embed", "blocks.*", "head"],
        ...     shard={
        ...         "embed": threefold.Vocab(),
        ...         "blocks.*.attn.temperature": threefold.Shard(0, heads=8),
        ...         "head.output": threefold.Vocab(),
        ...     },
        ... )
    """

    dim: int
    heads: int = 0

    needs_tensor_axis = True

    def cuts(self, parameter: str) -> tuple[Cut, ...]:
        return (Cut("tp", self.dim),)

    def units(self, parameter: str) -> Mapping[str, Unit]:
        return {"tp": Unit(HEADS, self.heads)} if self.heads else {}
