"""Batches of a user's own model for verification: a function of the step, of which each replica takes its part."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from threefold.config import Config
from threefold.errors import UserError
from threefold.models.own_batch import batch_size, map_tensors


@dataclass(frozen=True)
class OwnBatches:
    """The global batches of a user's own model.

    Attributes:
        make: step → the global batch, any nesting of tensors whose dim 0 counts the samples; the same on every rank.
    """

    make: Callable[[int], Any]
    masked: ClassVar[bool] = False

    def batch(self, config: Config, step: int, dp_index: int = 0, dp: int = 1) -> Any:
        """A replica's samples of the global batch of `step`.

        Raises:
            UserError: they do not divide among the replicas.
        """
        whole = self.make(step)
        samples = batch_size(whole)
        if samples % dp:
            raise UserError(
                f"The batch of step {step + 1} has {samples} samples, which dp {dp} must divide; use "
                f"{samples // dp * dp or dp}."
            )
        size = samples // dp
        return map_tensors(whole, partial(_part, start=dp_index * size, end=(dp_index + 1) * size))

    def __str__(self) -> str:
        return "batches of the user's"


def _part(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor[start:end]
