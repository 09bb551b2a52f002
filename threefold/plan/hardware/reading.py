"""Hardware entries as YAML: read with one sentence for each mistake, and written."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from threefold.config.document import read_document
from threefold.errors import UserError
from threefold.files import shown
from threefold.plan.hardware.entry import Achievable, Hardware, Link
from threefold.plugins import one_of

_DTYPES: Final = ("fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
_WHOLE: Final = ("memory_bytes", "multiprocessors", "gpus_per_node", "cores")
_TEXTS: Final = ("title", "device", "system", "gpt_system", "sharded_system")
_DEVICES: Final = ("cuda", "cpu")
_UNLESS_GIVEN: Final = {
    "device": "cuda",
    "multiprocessors": 1,
    "system": "own",
    "gpt_system": "",
    "sharded_system": "",
    "uncertainty": 0.3,
    "cores": 0,
}
_FRACTIONS: Final = ("matrix", "memory", "link", "network", "uncertainty")
"""Shares of which none is above 1; that of attention, which doctor measures beside small products, may be."""
_ZERO_ALLOWED: Final = (
    "latency",
    "matrix_depth",
    "attention_length",
    "attention_depth",
    "kernel",
    "block",
    "sharded_block",
    "tensor_block",
    "context_block",
    "step",
    "cores",
    "dollars_per_hour",
)

Entries = dict[str, dict[str, Any]]


def read_entries(path: Path) -> Entries:
    """The entries of a YAML file by name, `like` among their keys.

    Raises:
        UserError: the file cannot be read, or is no mapping of names to mappings.
    """
    value, _ = read_document(path, "the hardware entry ")
    if not isinstance(value, dict) or not value or not all(isinstance(entry, dict) for entry in value.values()):
        raise UserError(f"{shown(path)} must hold hardware entries, each a name with figures such as memory_bytes.")
    return {str(name): entry for name, entry in value.items()}


def one_entry(given: object, names: list[str]) -> str:
    """What a name must be that is none of `names`, with the nearest: if any begins with what is given, that one."""
    begun = [name for name in names if name.startswith(str(given))]
    return f"one of {', '.join(names)}; the nearest is {begun[0]}" if begun else one_of(given, names)


def build(name: str, entries: Entries, where: str) -> Hardware:
    """An entry as `Hardware`.

    Args:
        name: in `entries`.
        entries: all that `like` may name.
        where: the file, for sentences.

    Raises:
        UserError: a figure is missing, unknown, or no number above 0.
    """
    return _hardware(name, {**_UNLESS_GIVEN, **_expanded(name, entries, where)}, f"{where}, {name}")


def _expanded(name: str, entries: Entries, where: str, depth: int = 0) -> dict[str, Any]:
    """The figures of an entry with those of the entry that `like` names."""
    given = dict(entries[name])
    base = given.pop("like", None)
    if base is None:
        return given
    if not isinstance(base, str) or base not in entries or depth > len(entries):
        others = [other for other in entries if other != name]
        raise UserError(f"{where}, {name}: like is {shown(repr(base))} but must be {one_entry(base, others)}.")
    inherited = _expanded(base, entries, where, depth + 1)
    for key in ("matrix_rates", "inside", "between", "achievable"):
        if isinstance(given.get(key), dict) and isinstance(inherited.get(key), dict):
            given[key] = {**inherited[key], **given[key]}
    if "sources" in given and isinstance(given["sources"], list):
        given["sources"] = [*inherited.get("sources", ()), *given["sources"]]
    return {**inherited, **given}


def _hardware(name: str, values: dict[str, Any], where: str) -> Hardware:
    known = [each.name for each in fields(Hardware) if each.name != "name"]
    _require_known(values, [*known, "like"], where)
    for needed in known:
        if needed not in values and needed not in ("achievable", "dollars_per_hour", "sources"):
            raise UserError(f"{where}: {needed} is missing; give it, or take over an entry with like: h100.")
    for key in _TEXTS:
        if not isinstance(values[key], str):
            raise UserError(f"{where}: {key} is {shown(repr(values[key]))} but must be text.")
    if values["device"] not in _DEVICES:
        raise UserError(f"{where}: device is {shown(values['device'])} but must be cuda or cpu.")
    rates = _mapping(values, "matrix_rates", where)
    _require_known(rates, list(_DTYPES), f"{where}, matrix_rates")
    price, sources = values.get("dollars_per_hour"), values.get("sources") or ()
    if not isinstance(sources, list | tuple):
        raise UserError(f"{where}: sources is {shown(repr(sources))} but must be a list of text.")
    reached = _mapping(values, "achievable", where) if values.get("achievable") is not None else {}
    _require_known(reached, [each.name for each in fields(Achievable)], f"{where}, achievable")
    return Hardware(
        name=name,
        title=values["title"],
        device=values["device"],
        matrix_rates={dtype: _number(rates, dtype, f"{where}, matrix_rates") for dtype in rates},
        memory_bytes=int(_number(values, "memory_bytes", where)),
        memory_bandwidth=_number(values, "memory_bandwidth", where),
        multiprocessors=int(_number(values, "multiprocessors", where)),
        gpus_per_node=int(_number(values, "gpus_per_node", where)),
        inside=_link(values, "inside", where),
        between=_link(values, "between", where),
        achievable=Achievable(**{key: _number(reached, key, f"{where}, achievable") for key in reached}),
        system=values["system"],
        gpt_system=values["gpt_system"],
        sharded_system=values["sharded_system"],
        uncertainty=_number(values, "uncertainty", where),
        cores=int(_number(values, "cores", where)),
        dollars_per_hour=None if price is None else _number(values, "dollars_per_hour", where),
        sources=tuple(str(source) for source in sources),
    )


def _link(values: dict[str, Any], key: str, where: str) -> Link:
    link, where = _mapping(values, key, where), f"{where}, {key}"
    _require_known(link, ["bandwidth", "latency"], where)
    return Link(_number(link, "bandwidth", where), _number(link, "latency", where))


def _mapping(values: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    if not isinstance(values[key], dict) or not values[key]:
        raise UserError(f"{where}: {key} is {shown(repr(values[key]))} but must be a mapping of figures.")
    return dict(values[key])


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    if key not in values:
        raise UserError(f"{where}: {key} is missing.")
    value = values[key]
    least = "at least 0" if key in _ZERO_ALLOWED else "above 0"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UserError(f"{where}: {key} is {shown(repr(value))} but must be a number {least}.")
    if (value == 0 and key not in _ZERO_ALLOWED) or (key in _WHOLE and value != int(value)):
        raise UserError(f"{where}: {key} is {value:g} but must be a {'whole ' * (key in _WHOLE)}number {least}.")
    if value > 1 and key in _FRACTIONS:
        raise UserError(f"{where}: {key} is {value:g} but must be a share of at most 1; use 1.")
    return float(value)


def _require_known(values: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"{where}: {shown(str(key))} is no figure of it; it must be {one_of(key, known)}.")


def as_yaml(hardware: Hardware) -> str:
    """An entry as `read_entries` reads it."""
    import yaml

    values = asdict(hardware)
    name = values.pop("name")
    values["matrix_rates"], values["sources"] = dict(values["matrix_rates"]), list(values["sources"])
    return yaml.safe_dump({name: values}, sort_keys=False, allow_unicode=True, width=120)
