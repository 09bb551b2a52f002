"""The setting of µP, for the families whose weights it knows."""

from typing import ClassVar

from pydantic import Field

from threefold.config.model import WIDEST, ModelConfig


class WidthConfig(ModelConfig):
    """The `model` section of a family that has µP."""

    width_base: int = Field(default=0, ge=0, le=WIDEST)
    """For µP (docs/training.md), so that one learning rate suits all widths: the `hidden_size` of the model for which
    the settings were found, whose other widths are in the same ratio. Attention scores are then scaled by 1 /
    `head_dim`, and logits, initial values and learning rates depend on `hidden_size` / `width_base`. 0 for none."""

    unlisted: ClassVar[frozenset[str]] = ModelConfig.unlisted | {"width_base"}
