"""Extension points: what the package registers by name, and what other installed packages add through entry points.

A registry maps names to `module:attribute`. Built-in entries are a table in the package; further ones come from Python
entry points (https://packaging.python.org/specifications/entry-points/) of the registry's group, which another package
declares in its `pyproject.toml`:

    [project.entry-points."threefold.optimizers"]
    toy = "toy_package.optimizer:Toy"

Nothing is imported before it is used, and installed packages are searched only for names that are not built in.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from threefold.errors import UserError
from threefold.files import shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_LONGEST_NAME = 100
"""Characters of a wrong name that are compared with the registered ones."""


@dataclass(frozen=True)
class Registry:
    """The names that one setting can have.

    Attributes:
        setting: what selects an entry, such as `optimizer.name`; begins the error about an unknown name.
        group: the entry points that add to it, such as `threefold.optimizers`.
        built_in: name → `module:attribute` in the package; an entry point of the same name does not replace it.
    """

    setting: str
    group: str
    built_in: Mapping[str, str]

    def names(self) -> list[str]:
        """The built-in names in their order, then those of installed packages, sorted."""
        return [*self.built_in, *sorted(set(self._added()) - set(self.built_in))]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._added()

    def load(self, name: str) -> Any:
        """The object registered as `name`; its module is imported now.

        Raises:
            UserError: the name is unknown, two packages declare it, or what another package declares cannot be
                imported.
        """
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            return getattr(import_module(module), attribute)
        found = self._added().get(name)
        if not found:
            raise UserError(f"{self.setting} is {shown(repr(name))} but must be {one_of(name, self.names())}.")
        if len(found) > 1:
            raise UserError(
                f"{self.setting} is {shown(name)} but {' and '.join(map(_origin, found))} each declare it in the entry "
                f"points {self.group}; uninstall all but one."
            )
        try:
            return found[0].load()
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{self.setting} is {shown(name)} but {_origin(found[0])} declares it as {found[0].value}, which "
                f"cannot be imported ({error}); correct that entry point."
            ) from error

    def _added(self) -> "Mapping[str, list[EntryPoint]]":
        return _entry_points(self.group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> "Mapping[str, list[EntryPoint]]":
    """The entry points of a group by name, of the packages installed in `path`, which takes milliseconds to search."""
    from importlib.metadata import entry_points  # slow to import, and needed for names of other packages alone

    added: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        added.setdefault(point.name, []).append(point)
    return added


def one_of(given: object, names: list[str]) -> str:
    """What a value must be that is none of `names`, as the end of a sentence, with the nearest of them."""
    close = get_close_matches(str(given)[:_LONGEST_NAME].lower(), names, n=1, cutoff=0)
    return f"one of {', '.join(names)}; the nearest is {close[0]}"


def _origin(point: "EntryPoint") -> str:
    return f"the package {point.dist.name}" if point.dist else "an installed package"
