"""Extension points: names registered by the package, and by other packages through entry points.

The table of built-in names maps them to `module:attribute`; another package declares its own in its `pyproject.toml`:

    [project.entry-points."threefold.optimizers"]
    toy = "toy_package.optimizer:Toy"

Nothing is imported before it is used, and installed packages are searched only for names that are not built in. Some
registries also accept an import path: `package.module:Name`, or `path/to/file.py:Name`.
"""

import ast
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from threefold.doors import imported
from threefold.errors import UserError
from threefold.files import shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def is_import_path(name: str) -> bool:
    """Return whether a name has the form of an import path: `package.module:Name` or `file.py:Name`."""
    place, colon, attribute = name.rpartition(":")
    return bool(colon and place and attribute)


def load_path(path: str, setting: str) -> Any:
    """Import the object that an import path names; a module or file is executed once per process.

    Args:
        path: `package.module:Name` (an importable module, or `__main__` for the running script), or
            `path/to/file.py:Name`, relative to the working directory. `Name` may be dotted.
        setting: setting that holds the path, such as `optimizer.name`; begins the error message.
    """
    place, _, attribute = path.rpartition(":")
    try:
        found: Any = import_file(place) if place.endswith(".py") else import_module(place)
    except Exception as error:
        if place.endswith(".py") and not Path(place).is_file():
            reason = f"but {shown(place)} is not a file; name a Python file, as in my_file.py:{attribute}"
        elif isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            reason = (
                f"but Python finds no module {shown(error.name)}; name an importable one, or a file as in "
                f"{place.split('.')[-1]}.py:{attribute}"
            )
        else:
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            reason = f"but {shown(place)} cannot be imported ({what}); correct it"
        raise UserError(f"{setting} is {shown(path)} {reason}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, [name for name in dir(found) if not name.startswith("_")], n=1)
            nearest = f"; the nearest is {close[0]}" if close else ""
            raise UserError(f"{setting} is {shown(path)} but {shown(place)} has no {shown(part)}{nearest}.")
        found = getattr(found, part)
    return found


def import_path_of(thing: Any) -> str | None:
    """Return the import path of a class, a function or a named object, or None if it has none.

    An object counts if its class's module or the script binds it to a name. Lambdas and local definitions do not.
    """
    if not hasattr(thing, "__qualname__"):
        for place in (type(thing).__module__, "__main__"):
            names = vars(sys.modules[place]).items() if place in sys.modules else ()
            found_name = next((name for name, value in names if value is thing), None)
            if found_name is not None:
                return f"{place.partition('@')[2] or place}:{found_name}"
        return None
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    place = module.partition("@")[2] or module  # a module made from a file is named STEM@PATH
    return f"{place}:{name}" if found is thing else None


def import_file(file: Path | str) -> ModuleType:
    """Import a Python file as a module, searching its folder first for the modules that it imports.

    A file is executed once per process unless its content changes. Its exceptions are not caught.
    """
    path = os.path.realpath(file)
    return _executed(path, Path(path).read_bytes())


@cache
def _executed(file: str, source: bytes) -> ModuleType:
    spec = spec_from_file_location(f"{Path(file).stem}@{file}", file)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise ImportError("it is not a Python file")
    module, folder = module_from_spec(spec), os.path.dirname(file)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    # Modules imported earlier under the names of those beside the file, such as those beside a checkpoint's copy of it,
    # are hidden meanwhile.
    beside = {path.stem: str(path) for path in modules_beside(Path(file))}
    foreign = {
        name: sys.modules.pop(name)
        for name, path in beside.items()
        if name in sys.modules and getattr(sys.modules[name], "__file__", None) != path
    }
    sys.path.insert(0, folder)
    try:
        # The loader's own execution takes bytecode of a file of the same size and second for the file's.
        exec(spec.loader.source_to_code(source, file), module.__dict__)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        sys.path.remove(folder)
        sys.modules.update(foreign)
    return module


def modules_beside(file: Path) -> list[Path]:
    """Return the modules in a file's own folder that it imports, directly or indirectly, but no packages.

    The file is read but not executed; it need not be valid Python.
    """
    found: dict[str, Path] = {}
    left = [file]
    while left:
        modules: list[str] = []
        with suppress(SyntaxError, ValueError):  # executing it says what is wrong
            for node in ast.walk(ast.parse(left.pop().read_bytes())):
                if isinstance(node, ast.Import):
                    modules += [each.name for each in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.append(node.module)
        for name in (module.partition(".")[0] for module in modules):
            path = file.parent / f"{name}.py"
            if name not in found and name not in sys.stdlib_module_names and path.is_file():
                found[name] = path
                left.append(path)
    return list(found.values())


@dataclass(frozen=True)
class Registry:
    """Names that one setting accepts.

    Attributes:
        setting: setting that selects an entry, such as `optimizer.name`; begins the error about an unknown name.
        group: entry-point group that adds names, such as `threefold.optimizers`.
        built_in: name → `module:attribute` in the package; an entry point of the same name does not replace it.
        takes_paths: whether an import path is accepted in place of a name.
    """

    setting: str
    group: str
    built_in: Mapping[str, str]
    takes_paths: bool = False

    def names(self) -> list[str]:
        """Return the built-in names in their order, then the sorted names of installed packages."""
        return [*self.built_in, *sorted(set(self._added()) - set(self.built_in))]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or self.is_path(name) or name in self._added()

    def is_path(self, name: object) -> bool:
        """Return whether `name` is an import path that this registry accepts; nothing is imported."""
        return self.takes_paths and isinstance(name, str) and is_import_path(name)

    def load(self, name: str) -> Any:
        """Import and return the object registered as `name`."""
        if name in self.built_in:
            return imported(self.built_in[name])
        if self.is_path(name):
            return load_path(name, self.setting)
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
    """Return the entry points of a group by name; the packages installed in `path` take milliseconds to search."""
    from importlib.metadata import entry_points  # slow to import, and needed only for names of other packages

    added: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        added.setdefault(point.name, []).append(point)
    return added


def one_of(given: object, names: list[str]) -> str:
    """Return the end of a sentence about a wrong value: the names it may have, and the nearest of them or the first."""
    meant = [name for name in names if name in _MEANT.get(str(given), ())]
    close = meant or get_close_matches(str(given)[:100].lower(), names, n=1, cutoff=0.5)
    return f"one of {', '.join(names)}; " + (f"the nearest is {close[0]}" if close else f"use {names[0]}")


_MEANT: Final = {
    "gpu": ("cuda",),
    "float8": ("bf16", "fp16"),
    "fp8": ("bf16", "fp16"),
    "half": ("fp16",),
    "single": ("fp32",),
    "double": ("fp64",),
}
"""Names that are used elsewhere, and those here that mean the same or come next to it: the first that may be chosen."""


def require_one_of(name: str, given: Any, choices: Sequence[str]) -> None:
    """Raise a `UserError` unless the argument `name` is one of the choices."""
    if given not in choices:
        raise UserError(f"{name} is {given!r} but must be {one_of(given, list(choices))}.")


def _origin(point: "EntryPoint") -> str:
    return f"the package {point.dist.name}" if point.dist else "an installed package"
