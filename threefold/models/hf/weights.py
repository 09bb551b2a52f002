"""How a parameter is made of the tensors in Hugging Face's files: groups of rows, taken from one or several of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
