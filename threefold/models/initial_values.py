"""How the initial values of parameters are drawn, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std²).

    Args:
        std: standard deviation.
    """

    std: float


@dataclass(frozen=True)
class Constant:
    """One initial value for all elements.

    Args:
        value: of each element.
    """

    value: float


@dataclass(frozen=True)
class Drawn:
    """Initial values that a function such as `torch.nn.init.xavier_uniform_` draws.

    A rank holds one whole parameter at a time while it keeps its shard.

    Args:
        fill: fills a whole parameter in place, with torch's random numbers.
    """

    fill: Callable[["Tensor"], object]


@dataclass(frozen=True)
class AsConstructed:
    """The initial values that the model's own constructor draws.

    Every rank makes the whole model once, in its memory and not in that of its device, and keeps its shards.
    """


Initial = Normal | Constant | Drawn | AsConstructed
