"""The family of models that users bring themselves, as a Python file or as objects of a program."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from threefold.config.model import ModelConfig
from threefold.config.section import PathText
from threefold.models.family import Family


class OwnConfig(ModelConfig):
    """A user's own model."""

    architecture: Literal["own"] = "own"
    file: PathText = Field(default="", examples=["FILE.py:NAME"])
    """For `own`: Python file of the model, `FILE.py` or `FILE.py:NAME`, as set by `--model`. Default: none."""
    arguments: dict[str, Any] = Field(default_factory=dict, examples=["{width: 64}"])
    """For `own`: keyword arguments of the model's class. A parameter without a default that is missing here gets the
    setting of its name, such as `vocab_size`; one called `config` gets this whole section. Default: none."""

    @property
    def blocks(self) -> int | None:
        return None

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that break a rule; the sizes are up to the model itself."""
        yield from self.broken_by_setting_unused()


FAMILY = Family(
    title="own model",
    config=OwnConfig,
    model="threefold.models.source:make_own_model",
    plan="threefold.models.source:own_plan",
)
