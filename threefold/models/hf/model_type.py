"""A `model_type` of Hugging Face, as the family that it belongs to describes it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.config import ModelConfig
from threefold.models.hf.config_json import ConfigJson
from threefold.models.hf.weights import Shapes, WeightMap, copied


@dataclass(frozen=True)
class TensorNames:
    """The names of the tensors that the files hold as the model does.

    Attributes:
        outside: parameter outside the blocks → tensor.
        in_block: parameter, as it is called in its block → tensor, as it is called in its block.
        block: what the names of a block's tensors begin with; `{}` for its number.
    """

    outside: Mapping[str, str]
    in_block: Mapping[str, str]
    block: str


@dataclass(frozen=True)
class HuggingFaceType(ABC):
    """A `model_type`: its config.json and the names of its tensors.

    Attributes:
        name: the model_type.
        architecture: the family that it belongs to.
        head: class of transformers that has a language model's head.
        names: of the tensors that are copied as they are.
        prefix: what the names of all tensors but the head's begin with.
        defaults: of keys that a config.json lacks, as in transformers.
    """

    name: str
    architecture: str
    head: str
    names: TensorNames
    prefix: str = "model."
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def read(self, given: ConfigJson) -> dict[str, Any]:
        """The settings of `model`, except its architecture, from a config.json.

        Raises:
            UserError: a value that Threefold does not support.
        """

    @abstractmethod
    def write(self, model: Any) -> dict[str, Any]:
        """The keys of config.json for a resolved model that `obstacle` finds none in; model_type and tokens aside."""

    def obstacle(self, model: Any) -> str | None:
        """The first setting of a model of the family, with its value, that this type has no key for; None for none."""
        return None

    def is_near(self, model: Any) -> bool:
        """Whether an error about a model that no type fits should name this type's obstacle."""
        return True

    def training_only(self) -> Sequence[str]:
        """Settings of `model` that matter in training alone, and that config.json has no key for."""
        return ()

    def rearranged(
        self, name: str, in_block: str, block: str, model: Any, shapes: Shapes, present: Collection[str]
    ) -> list[WeightMap]:
        """How a parameter of a block is made that the files do not hold as it is.

        Args:
            name: of the parameter.
            in_block: the same, as it is called in its block.
            block: what the names of the block's tensors begin with.
            model: resolved.
            shapes: of all parameters, by name.
            present: names in the files; empty when they are to be written.
        """
        raise ValueError(f"{type(self).__name__} has no tensor for {name}")

    def weights(self, model: ModelConfig, shapes: Shapes, present: Collection[str] = ()) -> list[WeightMap]:
        """How every parameter is made, in the order of the layers.

        Args:
            model: resolved.
            shapes: of the parameters, by name.
            present: names in the files, which determine how experts are stored; one by one where it is empty.
        """
        maps: list[WeightMap] = []
        for name in shapes:
            if name in self.names.outside:
                maps.append(copied(name, self.names.outside[name], shapes))
                continue
            _, layer, in_block = name.split(".", 2)
            block = self.names.block.format(layer)
            if in_block in self.names.in_block:
                maps.append(copied(name, block + self.names.in_block[in_block], shapes))
            else:
                maps += self.rearranged(name, in_block, block, model, shapes, present)
        return maps


def yaml_word(value: bool) -> str:
    """`true` or `false`."""
    return str(value).lower()
