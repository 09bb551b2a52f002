"""How a parameter is made of the tensors in Hugging Face's files: groups of rows, taken from one or several of them."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.config import ModelConfig
from threefold.models.hf.config_json import ConfigJson

Shapes = Mapping[str, tuple[int, ...]]
"""Shape by name of a parameter."""


@dataclass(frozen=True)
class SourceRows:
    """Rows of a tensor in the files.

    Attributes:
        name: the tensor's.
        rows: how many of them go into each group of the parameter's rows.
        start: the first one.
        index: which of the matrices stacked in the tensor, where it is a stack.
    """

    name: str
    rows: int = 1
    start: int = 0
    index: int | None = None


@dataclass(frozen=True)
class WeightMap:
    """A parameter, or one expert's matrix of a parameter that stacks those of all: groups of rows, each with some rows
    of every source in order.

    Attributes:
        name: the parameter's.
        shape: the parameter's; of one expert's matrix, without the dim of the stack.
        sources: where the rows of a group come from.
        transposed: whether the files hold it the other way round, as [in, out].
        expert: which of the stack, if it is one.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[SourceRows, ...]
    transposed: bool = False
    expert: int | None = None

    @property
    def group(self) -> int:
        """Rows of a group."""
        return sum(source.rows for source in self.sources)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name of each tensor in the files; of a stack without its dim."""
        groups, rest = self.shape[0] // self.group, self.shape[1:]
        rows: dict[str, int] = {}
        for source in self.sources:
            rows[source.name] = rows.get(source.name, 0) + source.rows * groups
        shapes = {name: (count, *rest) for name, count in rows.items()}
        return {name: shape[::-1] for name, shape in shapes.items()} if self.transposed else shapes


def copied(name: str, source: str, shapes: Shapes) -> WeightMap:
    """A parameter that the files hold as it is."""
    return WeightMap(name, shapes[name], (SourceRows(source),))


def interleaved(name: str, shape: Sequence[int], sources: Sequence[SourceRows], expert: int | None = None) -> WeightMap:
    """A parameter whose groups of rows alternate between several tensors."""
    return WeightMap(name, tuple(shape), tuple(sources), expert=expert)


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
