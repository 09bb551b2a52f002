"""Doors: what attached rooms add to the core, which never imports them.

The core is what trains. An attached room is a subpackage that a run can do without, such as the planner; its module
`door` declares what it adds, objects as import paths, so that nothing of a room is imported before it is used:

    COMMANDS = {"plan": ("Plan", "threefold.planner.commands.plan:command")}
    CALLBACKS = {"stragglers": "threefold.resilience.stragglers:StragglerReport"}  # of every run
    FIRST_CALLBACKS = {"live_line": "threefold.report.console:LiveLine"}  # of every run, before those of the core
    CHOSEN_CALLBACKS = {"csv_log": "threefold.report.callbacks:CSVLog"}  # of a run that names them
    TOKEN_FORMATS = {"megatron": "threefold.convert.megatron_tokens:MEGATRON"}
    RUN_FILES = {"metrics": "metrics.jsonl"}  # that callbacks write into the folder of every run
    ATTACHMENTS = {"resilience": "threefold.resilience.attachment:FaultResponse"}  # `threefold.train.attachment`
    NAMES = {"verify_model": "threefold.verify.api:verify_model"}  # of `threefold`; TYPES, of `threefold.types`
    RULES = {"exact": "threefold.exact.rules:exact_rules"}  # of a resolved config, as `threefold.config.rules`
    DEFAULTS = {"grain": "threefold.exact.rules:default_grain"}  # of a config and its filled settings, by `section.key`
    SETTING_NAMES = {"other_systems": "threefold.convert.setting_names:SETTING_NAMES"}  # our setting → names elsewhere
    RUN_CHECKS = {"fault_policies": "threefold.resilience.rules:check_fault_policies"}  # of a config, before a run
    HOOKS = {"peak_rate": "threefold.planner.hardware:peak_rate"}  # functions that the core calls if the room is there
    NEEDS = ("cpu", "report")  # rooms that its modules import

A room that is not there, or that needs one that is not there, adds nothing. Other packages add names through entry
points (`plugins.Registry`).
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from threefold.errors import UserError

ROOMS: Final = (
    *("exact", "cpu", "verify", "parity", "planner", "resilience", "report", "convert", "huggingface", "inference"),
    *("compat", "adapters", "preference", "lesson"),
)
"""Attached rooms that add something, in the order in which their callbacks are called."""


@cache
def _doors() -> dict[str, ModuleType]:
    """Return the doors of the rooms that can be used, in their order."""
    return {room: door for room, door in _found().items() if _missing(room) is None}


def _missing(room: str) -> str | None:
    """Return the room, or one that it needs, that is not there; None if the room can be used."""
    if room not in _found():
        return room
    needs: tuple[str, ...] = getattr(_found()[room], "NEEDS", ())
    return next(filter(None, map(_missing, needs)), None)


@cache
def _found() -> dict[str, ModuleType]:
    """Import and return the doors of the rooms that are there, in their order."""
    found = {}
    for room in ROOMS:
        name = f"threefold.{room}.door"
        try:
            found[room] = import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, f"threefold.{room}"):
                raise
    return found


@cache
def added(kind: str) -> dict[str, Any]:
    """Return all that the rooms add of a kind, such as `COMMANDS`, by name, in the order of the rooms."""
    return {name: each for door in _doors().values() for name, each in getattr(door, kind, {}).items()}


def hook(name: str) -> Any:
    """Import and return what a room adds under `name` in its `HOOKS`; None if the room is not there."""
    path = added("HOOKS").get(name)
    return None if path is None else imported(path)


def call_hook(name: str, *arguments: Any) -> Any:
    """Call a function that a room adds, and return its result; None if the room is not there."""
    found = hook(name)
    return None if found is None else found(*arguments)


def needed(name: str, wanted: str, room: str) -> Any:
    """Return a hook, or raise a `UserError` that `wanted`, such as an option, needs the room that would declare it."""
    if (found := hook(name)) is None:
        raise _lacking(wanted, room)
    return found


def require_installed(room: str, wanted: str) -> None:
    """Raise a `UserError` that `wanted`, such as a setting, needs a room, where that is not there."""
    if room not in _doors():
        raise _lacking(wanted, room)


def _lacking(wanted: str, room: str) -> UserError:
    absent = _missing(room) or room
    return UserError(f"{wanted} needs threefold.{absent}, which is not installed; install it, or leave that out.")


def imported(path: str) -> Any:
    """Import and return the object of an import path `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
