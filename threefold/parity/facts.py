"""Facts of a rank's record: their schema, and what is refused of a file that a run cannot have written."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch

from threefold.checksums import unseal
from threefold.errors import UserError
from threefold.files import WrongFact, parse_facts, read_json, shown

FORMAT: Final = "threefold-parity"
VERSION: Final = 1

Number = float | Literal["nan", "inf", "-inf"]
"""Number in a record; as text where JSON has none."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers that a rank recorded in a step, and the samples that it read."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True}

    samples: list[str] = field(default_factory=list)
    micro_batches: int = 0
    valid_tokens: int = 0
    scalars: dict[str, Number] = field(default_factory=dict)
    counters: dict[str, dict[str, Number]] = field(default_factory=dict)
    drew_random_numbers: bool = False
    unreached: list[str] = field(default_factory=list)
    unpadded: dict[str, str] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RecordFacts:
    """Facts of a rank; those with a default may be missing."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True}

    format: Literal["threefold-parity"]
    version: int
    rank: int
    world_size: int
    steps: int
    numbers: dict[str, StepNumbers]
    checksums: list[str]
    versions: dict[str, str] = field(default_factory=dict)
    planned_steps: int = 0
    whole: int = 0
    adapter: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    epoch_steps: int = 0
    after: int = 0
    dtypes: list[str] = field(default_factory=list)
    activation_dtypes: list[str] = field(default_factory=list)
    weight_dtypes: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str | int] = field(default_factory=dict)
    perturbed: bool = False
    wide: bool = False
    offers_wide: bool = False
    readers: dict[str, list[str]] = field(default_factory=dict)


def read_facts(path: Path, rank: int) -> dict[str, Any]:
    """Return the facts that a rank wrote; raise a `UserError` for any other content."""
    found = read_json(path, "the record ")
    facts = unseal(found) if isinstance(found, dict) else None
    if facts is None or facts.get("format") != FORMAT:
        raise UserError(
            f"The record {shown(path.parent)} is damaged: {path.name} is not what a run wrote; record again."
        )
    if facts.get("version") != VERSION:
        version = shown(str(facts.get("version")))
        raise UserError(
            f"The record {shown(path.parent)} has version {version}, and this program reads version {VERSION}; record "
            "again."
        )
    try:
        parse_facts(RecordFacts, facts)
        _check(facts, rank)
    except WrongFact as problem:
        raise UserError(
            f"The record {shown(path.parent)} is damaged: {path.name} is not what a run wrote ({problem}); record "
            "again."
        ) from None
    return facts


def _check(facts: dict[str, Any], rank: int) -> None:
    """Raise `WrongFact` for a value of the right type that no run writes."""
    steps, dtypes = facts["steps"], facts.get("weight_dtypes", {}).values()
    right = {
        "world_size": facts["world_size"] > rank,
        "rank": facts["rank"] == rank,
        "steps": steps >= 0,
        "checksums": len(facts["checksums"]) > steps,
        "numbers": all(str(step) in facts["numbers"] for step in range(1, min(steps, len(facts["numbers"]) + 1) + 1)),
        "weight_dtypes": all(isinstance(getattr(torch, each, None), torch.dtype) for each in dtypes),
    }
    for name, is_right in right.items():
        if not is_right:
            raise WrongFact(name, facts)
