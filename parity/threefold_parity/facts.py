"""Facts of a rank's record: their schema, and what is refused of a file that a run cannot have written."""

import json
from pathlib import Path
from typing import Any, Final

import torch

from threefold_parity.files import load_json, read_bytes, unseal
from threefold_parity.text import UserError, shown

FORMAT: Final = "threefold-parity"
VERSION: Final = 1

_NUMBER: Final = "number"
"""A number, as text (`nan`, `inf`, `-inf`) where JSON has none."""
_STEP: Final = {
    "samples": [str],
    "micro_batches": int,
    "valid_tokens": int,
    "scalars": {str: _NUMBER},
    "counters": {str: {str: _NUMBER}},
    "drew_random_numbers": bool,
    "unreached": [str],
    "unpadded": {str: str},
    "lengths": [int],
}
_REQUIRED: Final = ("rank", "world_size", "steps", "numbers", "checksums")
_SCHEMA: Final = {
    "rank": int,
    "world_size": int,
    "steps": int,
    "numbers": {str: _STEP},
    "checksums": [str],
    "versions": {str: str},
    "planned_steps": int,
    "whole": int,
    "adapter": str,
    "axes": {str: int},
    "epoch_steps": int,
    "after": int,
    "dtypes": [str],
    "activation_dtypes": [str],
    "weight_dtypes": {str: str},
    "machine": {str: (str, int)},
    "perturbed": bool,
    "wide": bool,
    "offers_wide": bool,
    "readers": {str: [str]},
}
"""Types by name: `[X]` is a list of X, `{str: X}` an object of any names, `(X, Y)` either."""


def read_facts(path: Path, rank: int) -> dict[str, Any]:
    """Return the facts that a rank wrote; raise a `UserError` for any other content."""
    damaged = f"The record {shown(path.parent)} is damaged: {path.name} is not what a run wrote{{}}; record again."
    try:
        found = load_json(read_bytes(path))
    except (OSError, ValueError):
        found = None
    facts = unseal(found) if isinstance(found, dict) else None
    if facts is None or facts.get("format") != FORMAT:
        raise UserError(damaged.format(""))
    if facts.get("version") != VERSION:
        version = shown(facts.get("version"))
        raise UserError(
            f"The record {shown(path.parent)} has version {version}, and this program reads version {VERSION}; record "
            "again."
        )
    for name in _REQUIRED:
        if name not in facts:
            raise UserError(damaged.format(f" (it has no {name})"))
    wrong = next((name for name, kind in _SCHEMA.items() if name in facts and not _fits(facts[name], kind)), "")
    if wrong := wrong or _impossible(facts, rank):
        raise UserError(damaged.format(f" (its {wrong} is {shown(json.dumps(facts[wrong]))})"))
    return facts


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of a type of the schema."""
    if isinstance(kind, tuple):
        return any(_fits(value, each) for each in kind)
    if isinstance(kind, list):
        return type(value) is list and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        if type(value) is not dict:
            return False
        known = {name: kind.get(str, kind.get(name)) for name in value}  # other members are ignored
        return all(known[name] is None or _fits(each, known[name]) for name, each in value.items())
    if kind is _NUMBER:
        finite = type(value) is int and abs(value) < 1 << 1000
        return finite or type(value) is float or value in ("nan", "inf", "-inf")
    return type(value) is kind


def _impossible(facts: dict[str, Any], rank: int) -> str:
    """Return the name of a fact whose value is of the right type, and that no run writes; empty if there is none."""
    steps, dtypes = facts["steps"], facts.get("weight_dtypes", {}).values()
    right = {
        "world_size": facts["world_size"] > rank,
        "rank": facts["rank"] == rank,
        "steps": steps >= 0,
        "checksums": len(facts["checksums"]) > steps,
        "numbers": all(str(step) in facts["numbers"] for step in range(1, min(steps, len(facts["numbers"]) + 1) + 1)),
        "weight_dtypes": all(isinstance(getattr(torch, each, None), torch.dtype) for each in dtypes),
    }
    return next((name for name, is_right in right.items() if not is_right), "")
