"""Settings whose value changes during a run, such as `train.global_batch_size: {0: 256, 1000: 512}`.

The value of such a setting is a number, like any other setting's, that also knows its values by step. What does not
change during a run, such as memory, layout and plan, is computed from the number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class _ByStep:
    """Base of values by step: `entries` maps the number of steps made before to the value from there on, ascending."""

    entries: Mapping[int, Any]

    def __reduce__(self) -> tuple[type, tuple[Mapping[int, Any]]]:
        return type(self), (self.entries,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.entries == other.entries

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self.entries.items()))

    def __repr__(self) -> str:
        return repr(self.entries)

    __str__ = __repr__


class NumberByStep(_ByStep, int):
    """Whole number for each step of a run. As a number, it is the largest of them."""

    def __new__(cls, entries: Mapping[int, int]) -> "NumberByStep":
        """Make the number from entries in any order, one of them of step 0."""
        made = super().__new__(cls, max(entries.values()))
        made.entries = dict(sorted(entries.items()))
        return made


class WeightByStep(_ByStep, float):
    """Weight of a corpus for each step of a run. As a number, it is the last of them, with which a run evaluates."""

    def __new__(cls, entries: Mapping[int, float]) -> "WeightByStep":
        """Make the weight from entries in any order, one of them of step 0."""
        made = super().__new__(cls, entries[max(entries)])
        made.entries = dict(sorted(entries.items()))
        return made


Entries = tuple[tuple[int, Any], ...]


def entries_of(value: Any) -> Entries:
    """Return the steps from which a setting has a value, with the value: (0, value) for one that does not change."""
    return tuple(value.entries.items()) if hasattr(value, "entries") else ((0, value),)


def plain(value: Any) -> Any:
    """Return a setting's value as in YAML."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return dict(value.entries) if hasattr(value, "entries") else value


def described(value: int) -> str:
    """Return a setting's values as text, with the numbers of steps counted from 1."""
    (_, first), *later = entries_of(value)
    then = ", ".join(f"{each:,} from step {step + 1:,} on" for step, each in later)
    return f"{first:,} ({then})" if later else f"{first:,}"


def value_at(value: Any, step: int) -> Any:
    """Return a setting's value for the step after `step` steps."""
    return next(each for first, each in reversed(entries_of(value)) if first <= max(step, 0))


def sum_before(value: int, step: int) -> int:
    """Return the sum of a setting's values over the first `step` steps."""
    total, entries = 0, entries_of(value)
    for (first, each), (end, _) in zip(entries, (*entries[1:], (step, 0)), strict=True):
        total += max(0, min(end, step) - first) * each
    return total


def steps_to_sum(value: int, wanted: int) -> int:
    """Return the fewest steps over which a setting's values add up to `wanted`; negative ones continue the first."""
    total, entries = 0, entries_of(value)
    for (first, each), (end, _) in zip(entries, (*entries[1:], (None, 0)), strict=True):
        if end is None or wanted <= total + (end - first) * each:
            break
        total += (end - first) * each
    return first - (total - wanted) // each


def parts_by_step(sizes: int, lengths: int) -> tuple[int, int]:
    """Return the parts that each step reads, of the greatest length that divides all lengths, and those of the longest.

    Without lengths that change, a part is a sample.
    """
    unit = gcd(*(length for _, length in entries_of(lengths)))
    steps = sorted({step for value in (sizes, lengths) for step, _ in entries_of(value)})
    read = {step: value_at(sizes, step) * value_at(lengths, step) // unit for step in steps}
    return (NumberByStep(read) if len(read) > 1 else read[0]), int(lengths) // unit


@dataclass(frozen=True)
class ByStep:
    """Annotation of a setting that may change during a run, after the limits of its values."""

    kind: type[NumberByStep] | type[WeightByStep] = NumberByStep

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        each = handler(schema)
        return {"anyOf": [each, {"type": "object", "additionalProperties": each, "minProperties": 1}]}

    def _read(self, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        given = plain(given)
        if not isinstance(given, dict):
            return handler(given)
        if not given or any(type(step) is not int or step < 0 for step in given) or 0 not in given:
            raise ValueError(
                "a value, or values by the number of steps made before, from 0 on; use "
                f"{{0: {next(iter(given.values()), 'VALUE')}}}"
            )
        found: dict[int, Any] = {}
        for step, value in given.items():
            try:
                is_absent = self.kind is WeightByStep and type(value) in (int, float) and value == 0
                found[step] = 0.0 if is_absent else handler(value)
            except ValidationError as error:
                context = {"step": step, "value": value, "problem": error.errors()[0]}
                raise PydanticCustomError("by_step", "by step", context) from None
        return self.kind(found)
