"""Types of Hugging Face models: their config.json, and how parameters are assembled from rows of the files' tensors."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.config import ModelConfig
from threefold.models.hf.config_json import ConfigJson

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters, by name."""


@dataclass(frozen=True)
class SourceRows:
    """Rows of a tensor in the files.

    Attributes:
        name: name of the tensor.
        rows: number of its rows in each group of the parameter's rows.
        start: first row.
        index: index of the matrix, if the tensor is a stack of matrices.
    """

    name: str
    rows: int = 1
    start: int = 0
    index: int | None = None


@dataclass(frozen=True)
class WeightMap:
    """Map from tensors in the files to a parameter, or to one expert's matrix of a stacked parameter.

    The rows of the parameter form groups, each with some rows of every source in order.

    Attributes:
        name: name of the parameter.
        shape: shape of the parameter; for one expert's matrix, without the dim of the stack.
        sources: rows that make up a group.
        transposed: whether the files hold the transpose, [in, out].
        expert: index of the expert, if the parameter is a stack.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[SourceRows, ...]
    transposed: bool = False
    expert: int | None = None

    @property
    def group(self) -> int:
        """Number of rows in a group."""
        return sum(source.rows for source in self.sources)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor in the files, by name; of a stack, without its dim."""
        groups, rest = self.shape[0] // self.group, self.shape[1:]
        rows: dict[str, int] = {}
        for source in self.sources:
            rows[source.name] = rows.get(source.name, 0) + source.rows * groups
        shapes = {name: (count, *rest) for name, count in rows.items()}
        return {name: shape[::-1] for name, shape in shapes.items()} if self.transposed else shapes


def copied(name: str, source: str, shapes: Shapes) -> WeightMap:
    """Map a parameter that the files hold unchanged."""
    return WeightMap(name, shapes[name], (SourceRows(source),))


def interleaved(name: str, shape: Sequence[int], sources: Sequence[SourceRows], expert: int | None = None) -> WeightMap:
    """Map a parameter whose groups of rows alternate between several tensors."""
    return WeightMap(name, tuple(shape), tuple(sources), expert=expert)


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors that are copied unchanged.

    Attributes:
        outside: parameter outside the blocks → tensor.
        in_block: parameter → tensor, both by their names within the block.
        block: prefix of the names of a block's tensors; `{}` stands for its number.
    """

    outside: Mapping[str, str]
    in_block: Mapping[str, str]
    block: str


@dataclass(frozen=True)
class HuggingFaceType(ABC):
    """A `model_type` of Hugging Face: its config.json and the names of its tensors.

    Attributes:
        name: the model_type.
        architecture: family that it belongs to.
        head: class of transformers that includes a language-model head.
        names: names of the tensors that are copied unchanged.
        prefix: prefix of all tensor names except the head's.
        defaults: values of keys that a config.json lacks, as in transformers.
    """

    name: str
    architecture: str
    head: str
    names: TensorNames
    prefix: str = "model."
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def read(self, given: ConfigJson) -> dict[str, Any]:
        """Return the settings of `model`, except the architecture; raise UserError for an unsupported value."""

    @abstractmethod
    def write(self, model: Any) -> dict[str, Any]:
        """Return the keys of config.json for a resolved model without an `obstacle`, except model_type and tokens."""

    def obstacle(self, model: Any) -> str | None:
        """Return the first setting of a model, with its value, that this type has no key for; None if there is none."""
        return None

    def is_near(self, model: Any) -> bool:
        """Return whether an error about a model that fits no type should name this type's obstacle."""
        return True

    def training_only(self) -> Sequence[str]:
        """Return the settings of `model` that only matter in training and have no key in config.json."""
        return ()

    def rearranged(
        self, name: str, in_block: str, block: str, model: Any, shapes: Shapes, present: Collection[str]
    ) -> list[WeightMap]:
        """Map a parameter of a block that the files do not hold unchanged.

        Args:
            name: name of the parameter.
            in_block: its name within the block.
            block: prefix of the names of the block's tensors.
            model: resolved `model` section.
            shapes: shapes of all parameters, by name.
            present: names in the files; empty when writing.
        """
        raise ValueError(f"{type(self).__name__} has no tensor for {name}")

    def weights(self, model: ModelConfig, shapes: Shapes, present: Collection[str] = ()) -> list[WeightMap]:
        """Map every parameter, in the order of the layers.

        `present` are the names in the files, which determine how experts are stored: one by one if it is empty.
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
    return str(value).lower()
