"""The `model` section of a model of one's own: where it comes from, and what its constructor is called with."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from threefold.config.model import ModelConfig
from threefold.config.section import PathText


class OwnConfig(ModelConfig):
    """A model of a user's own."""

    architecture: Literal["own"] = "own"
    file: PathText = Field(default="", examples=["FILE.py:NAME"])
    """For `own`: the Python file of the model, `FILE.py` or `FILE.py:NAME`, as `--model` sets it. Default: none."""
    arguments: dict[str, Any] = Field(default_factory=dict, examples=["{width: 64}"])
    """For `own`: keyword arguments of the model's class. A parameter without a default that is not among them gets the
    setting of its name, such as `vocab_size`; one called `config` gets this whole section. Default: none."""

    @property
    def blocks(self) -> int | None:
        return None

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Settings that break a rule: the model itself decides what its sizes may be."""
        yield from self.broken_by_setting_unused()
