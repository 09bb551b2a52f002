"""Check that this torch has the private parts that the files beside this one name, as read from their sources.

The canaries in `tests/test_torch_private.py` also test what the parts do, and attributes of objects made on the way.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from threefold.errors import UserError

TESTED: Final = "2.13.0"
"""Release of torch whose private parts the tests have used; its builds for other devices have the same Python code."""


def require_parts(version: str) -> None:
    """Raise a `UserError` if the installed torch is of another `version` than the tested one, and lacks a part."""
    if version.partition("+")[0] != TESTED and (missing := next(missing_parts(), None)):
        raise UserError(
            f"torch {version} has no {missing}, which Threefold uses; install the release that it is tested with, pip "
            f"install torch=={TESTED}."
        )


def missing_parts() -> Iterator[str]:
    """Yield the parts of torch that this package's files name and that the installed torch does not have."""
    return (part for part, found in named_parts() if not found)


def named_parts() -> Iterator[tuple[str, bool]]:
    """Yield each part of torch that this package's files name, and whether the installed torch has it."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file != Path(__file__):
            yield from _Reader({}).parts(ast.parse(file.read_text(encoding="utf-8")))


class _Known(NamedTuple):
    """Object that a name stands for, as `torch` calls it; of instances, only the class is known."""

    path: str
    value: Any
    is_instance: bool = False

    def has(self, name: str) -> bool:
        """Return whether the object has an attribute; an instance, also what its class or a subclass sets."""
        if hasattr(self.value, name) or not self.is_instance:
            return hasattr(self.value, name)
        set_by = [getattr(kind.__init__, "__code__", None) for kind in (self.value, *self.value.__subclasses__())]
        return any(name in inspect.get_annotations(kind) for kind in self.value.__mro__) or any(
            code is not None and name in code.co_names for code in set_by
        )


class _Reader:
    """Reader of a scope of a file, which knows what its names stand for."""

    def __init__(self, names: Mapping[str, _Known], bases: tuple[_Known, ...] = ()) -> None:
        self.names, self.bases = dict(names), bases

    def parts(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """Yield the parts of torch below a node, in the order of the source."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from self._imported(child)
            elif isinstance(child, ast.FunctionDef):
                yield from self._of_function(child).parts(child)
            elif isinstance(child, ast.ClassDef):
                bases = (self._resolved(base) for base in child.bases)
                yield from _Reader(self.names, tuple(each for each in bases if each)).parts(child)
            elif isinstance(child, ast.Attribute):
                yield from self._looked_up(child)
            else:
                yield from self.parts(child)
                if isinstance(child, ast.Assign) and (found := self._resolved(child.value)):
                    self.names[ast.unparse(child.targets[0])] = found

    def _of_function(self, node: ast.FunctionDef) -> "_Reader":
        made = _Reader(self.names, self.bases)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            made.names.pop(argument.arg, None)
            kind = self._resolved(argument.annotation) if argument.annotation else None
            if kind and isinstance(kind.value, type):
                made.names[argument.arg] = kind._replace(is_instance=True)
        return made

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, bool]]:
        module = getattr(node, "module", None)
        for alias in node.names:
            path = f"{module}.{alias.name}" if module else alias.name
            if path.split(".")[0] != "torch":
                continue
            found = _found(path)
            yield path, found is not None
            if alias.asname or module:
                name, value = alias.asname or alias.name, found
            else:
                name, value, path = "torch", _found("torch"), "torch"
            if value is not None:
                self.names[name] = _Known(path, value)

    def _looked_up(self, node: ast.Attribute) -> Iterator[tuple[str, bool]]:
        """Yield what a chain of attributes looks up first of an object that is known."""
        if ast.unparse(node.value) == "super()":
            if self.bases:
                yield f"{self.bases[0].path}.{node.attr}", any(base.has(node.attr) for base in self.bases)
        elif (base := self._resolved(node.value)) is None:
            yield from self.parts(node)
        elif not base.is_instance or node.attr.startswith("_"):
            yield f"{base.path}.{node.attr}", base.has(node.attr)

    def _resolved(self, node: ast.AST) -> _Known | None:
        """Return what an expression stands for; None if that depends on more than names and attributes."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self._resolved(node.value)) and not base.is_instance:
            missing = object()
            found = getattr(base.value, node.attr, missing)
            return None if found is missing else _Known(f"{base.path}.{node.attr}", found)
        return None


def _found(path: str) -> Any:
    """Return the module of this name, or the member of a module; None if there is neither."""
    try:
        return import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(_found(module), name, None) if module else None
