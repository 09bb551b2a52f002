"""Callbacks of a run: those that report on every run, and those that `train.callbacks` names.

A callback is a subclass of `Callback` with a line here; or an entry point of the group `threefold.callbacks` in another
package; or a class named by its import path, which needs neither. docs/developing.md lists what else follows.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from threefold.doors import added
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import Registry, one_of
from threefold.train.callbacks.base import Callback, RunContext

_ALWAYS: Final = {  # callbacks of every run, in calling order
    **added("FIRST_CALLBACKS"),
    "step_log": "threefold.train.callbacks.step_log:StepLog",
    **added("CALLBACKS"),
}
_CHOSEN: Final = added("CHOSEN_CALLBACKS")  # callbacks of a run that names them in `train.callbacks`
CALLBACKS: Final = Registry("train.callbacks", "threefold.callbacks", {**_ALWAYS, **_CHOSEN}, takes_paths=True)

Entry = str | Mapping[str, Any]
"""Entry of `train.callbacks`: a name or import path, or a mapping with it as `name` beside the arguments."""


def check_names(entries: Sequence[Entry]) -> None:
    """Check before any process starts that `train.callbacks` names callbacks and gives them valid arguments.

    Callbacks of installed packages are imported only if there are arguments to check. Raises a `UserError` if a
    callback does not exist, is not a `Callback`, lacks a package, or does not take its arguments.
    """
    for entry in entries:
        name, arguments = _parsed(entry)
        if name not in CALLBACKS:
            raise UserError(f"{CALLBACKS.setting} has {name!r} but each must be {one_of(name, CALLBACKS.names())}.")
        if name in _CHOSEN or name in _ALWAYS or arguments or CALLBACKS.is_path(name):
            kind = _load(name)
            require_packages(kind, f"{CALLBACKS.setting} has {shown(name)}")
            _check_arguments(kind, name, arguments)


def try_trackers(entries: Sequence[Entry]) -> None:
    """Try the trackers of `train.callbacks` before any process starts; raise a `UserError` for one that cannot log."""
    for name, arguments in map(_parsed, entries):
        kind: Any = _load(name) if name in _CHOSEN else None
        if hasattr(kind, "try_out"):
            kind(**arguments).try_out()


def files_of(entries: Sequence[Entry]) -> list[str]:
    """Return the files in the run's folder that built-in callbacks of `train.callbacks` overwrite (their `path`)."""
    found = []
    for name, arguments in map(_parsed, entries):
        if name in _CHOSEN and (parameter := inspect.signature(_load(name)).parameters.get("path")):
            found.append(str(arguments.get("path", parameter.default)))
    return [path for path in found if not os.path.isabs(path)]


def import_always() -> None:
    """Import the callbacks of every run, before processes are forked."""
    for name in _ALWAYS:
        _load(name)


def make_callbacks(run: RunContext, given: Sequence[Callback] = ()) -> list[Callback]:
    """Make the callbacks of this rank: the built-in ones, those of `train.callbacks` in their order, then `given`.

    Given instances are used on the ranks that their `ranks` specifies. Raises a `UserError` on every rank, if a
    callback cannot be imported or is not a `Callback`.
    """
    entries = [_parsed(entry) for entry in run.config.train.callbacks or ()]
    wanted: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _ALWAYS]
    wanted += [each for each in entries if each[0] not in _ALWAYS or each[1]]
    made: list[Callback | None] = []
    for name, arguments in wanted:
        kind: Any = _load(name)  # on every rank, so that each raises what is wrong
        if kind.ranks == "all" or run.mesh.rank == 0:
            made.append(kind.for_run(run.of(kind), **arguments) if _makes_itself(kind) else kind(**arguments))
    made += [callback for callback in given if callback.ranks == "all" or run.mesh.rank == 0]
    return [callback for callback in made if callback is not None]


def require_packages(kind: Callback | type[Callback], beginning: str) -> None:
    """Raise a `UserError` that starts with `beginning` unless the packages of a callback are installed."""
    for package in kind.packages:
        if find_spec(package) is None:
            raise UserError(
                f"{beginning}, which needs the package {package}, which is not installed; install it with `pip install "
                f"{package}`, or leave the callback out."
            )


def _parsed(entry: Entry) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    arguments = dict(entry)
    return arguments.pop("name"), arguments


def _load(name: str) -> type[Callback]:
    found = CALLBACKS.load(name)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(
            f"{CALLBACKS.setting} has {name}, which is declared as {found!r} but must be a subclass of "
            f"{Callback.__module__}.{Callback.__qualname__}."
        )
    return found


def _makes_itself(kind: type[Callback]) -> bool:
    return kind.for_run.__func__ is not Callback.for_run.__func__  # type: ignore[attr-defined]


def _check_arguments(kind: type[Callback], name: str, arguments: Mapping[str, Any]) -> None:
    makes = _makes_itself(kind)
    signature = inspect.signature(kind.for_run if makes else kind)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD][makes:]
    takes = [parameter.name for parameter in parameters]
    try:
        signature.bind(*([None] if makes else []), **arguments)
    except TypeError:
        wrong = [argument for argument in arguments if argument not in takes]
        missing = [each.name for each in parameters if each.default is each.empty and each.name not in arguments]
        if wrong and not takes:
            rule = f"takes no arguments but is given {shown(wrong[0])}; leave it out"
        elif wrong:
            nearest = one_of(wrong[0], takes).rpartition(" ")[2]
            rule = f"takes {', '.join(takes)} but is given {shown(wrong[0])}; the nearest is {nearest}"
        else:
            rule = f"needs {', '.join(missing)}; write {{name: {name}, {missing[0]}: …}}"
        raise UserError(f"{CALLBACKS.setting} has {shown(name)}, which {rule}.") from None
    if name in _CHOSEN:
        kind(**arguments)  # the constructor checks the values
