"""Model families: the parts of each, found by one name in the registry."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from threefold.config.model import FAMILIES, ModelConfig
from threefold.config.section import PathText

if TYPE_CHECKING:
    from threefold.models.layers.decoder import Decoder
    from threefold.models.sharding import ModelPlan


Shapes = Mapping[str, tuple[int, ...]]  # shapes of parameters, by name


@dataclass(frozen=True)
class Family:
    """Parts of a model family; those that need torch are written as `module:attribute` and imported on first use."""

    title: str  # display name
    config: type[ModelConfig]  # class of its `model` section
    model: str  # class or function from a resolved config to the single-device model
    plan: str  # function from a resolved config and the tokens of a sample to the `ModelPlan`
    huggingface: str | None = None  # tuple of `huggingface.mapping.HuggingFaceType`s; exported as the first that fits
    # Function from a resolved config and the name of a layer to the `Shapes` of its parameters, without torch; None if
    # they have to be read from the model on the meta device.
    shapes: str | None = None

    def import_parts(self) -> None:
        """Import the model and the plan, before the process is forked."""
        for part in (self.model, self.plan):
            resolve_name(part)

    def make_plan(self, config: ModelConfig, sequence_length: int) -> "ModelPlan":
        return resolve_name(self.plan)(config, sequence_length)

    def layer_shapes(self, config: ModelConfig, layer: str) -> Shapes | None:
        """Return the shapes of a layer's parameters, without torch; None if the family does not declare them."""
        return None if self.shapes is None else resolve_name(self.shapes)(config, layer)


def family_of(config: ModelConfig) -> Family:
    return FAMILIES.load(config.architecture)


def make_model(config: ModelConfig) -> "Decoder":
    """Create the unsharded, single-device model of a resolved config (no field is None)."""
    return resolve_name(family_of(config).model)(config)


def model_plan(config: ModelConfig, sequence_length: int) -> "ModelPlan":
    """Return the sharding plan of a resolved config; the tokens of a sample determine the cost of attention."""
    return family_of(config).make_plan(config, sequence_length)


class CustomConfig(ModelConfig):
    """A custom model."""

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


CUSTOM_FAMILY = Family(
    title="own model",
    config=CustomConfig,
    model="threefold.models.source:make_custom_model",
    plan="threefold.models.source:custom_plan",
)
