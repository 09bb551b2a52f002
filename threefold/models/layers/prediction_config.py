"""Settings of multi-token prediction, for the families that can have it."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from threefold.config.model import ModelConfig


class PredictionConfig(ModelConfig):
    """The `model` section of a family that can predict further tokens."""

    mtp_layers: int = Field(default=0, ge=0, le=64)
    """For `llama` and `deepseek`: number of tokens after the next one that training predicts too (multi-token
    prediction of DeepSeek-V3), each by one more block like the last one; 0 for none."""
    mtp_loss: float = Field(default=0.3, ge=0)
    """With `mtp_layers`: weight of the mean of the further tokens' losses in the minimized loss."""

    unlisted: ClassVar[frozenset[str]] = frozenset(("mtp_layers", "mtp_loss"))

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect given the others, each with the rule against setting it."""
        if not self.mtp_layers:
            yield "mtp_loss", "model.mtp_layers is 0; use mtp_layers 1 or leave it out"
        yield from super().unused()
