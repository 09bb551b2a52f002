"""What would make an impossible request possible, in one sentence."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from threefold.byte_sizes import format_bytes
from threefold.errors import UserError
from threefold.plan.hardware.entry import Hardware
from threefold.plan.search.costs import Costs
from threefold.plan.search.search import Found

Run = Callable[[int, Mapping[str, Any]], Found]
"""Searches so many GPUs with so many fixed settings."""
_NEAR: Final = 64
"""Numbers of GPUs above and below that are tried for one with a sound layout."""
_LARGER: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST: Final = 16384
"""GPUs, above which no larger number is tried: a search of so many takes seconds."""
_BETWEEN: Final = (0.625, 0.75, 0.875)
"""Of the smallest of the larger numbers with a layout that fits, which parts are tried too."""


def no_layout(gpus: int, fixed: Mapping[str, Any], found: Found, run: Run) -> UserError:
    """The error that no layout of so many GPUs is sound.

    Args:
        gpus: that there are.
        fixed: settings that layouts must have.
        found: of the search.
        run: searches another number of GPUs.
    """
    having = f" with {_words(fixed)}" if fixed else ""
    head = f"--gpus is {gpus} but no layout of so many GPUs{having} is sound"
    why = f" ({found.refusals[0].example}: {found.refusals[0].sentence.rstrip('.')})" if found.refusals else ""
    for key, value in fixed.items():
        if run(gpus, {other: given for other, given in fixed.items() if other != key}).sound:
            near = _around(value) if isinstance(value, int) and not isinstance(value, bool) else ()
            better = next((count for count in near if run(gpus, {**fixed, key: count}).sound), None)
            use = f"use --fix {key}={better}, or " if better is not None else ""
            return UserError(f"{head}{why}; {use}leave out --fix {key}={_word(value)}.")
    for count in _around(gpus):
        if run(count, fixed).sound:
            return UserError(f"{head}{why}; use {count}.")
    below = next((count for count in _powers_below(gpus) if run(count, fixed).sound), None)
    if below is not None:
        return UserError(f"{head}{why}; use {below}.")
    return UserError(f"{head}{why}; use a number that divides the global batch and the model's heads and layers.")


def none_fits(
    gpus: int,
    fixed: Mapping[str, Any],
    hardware: Hardware,
    usable: int,
    found: Found,
    costs: Costs,
    run: Run,
) -> UserError:
    """The error that no sound layout fits into memory.

    Args:
        gpus, fixed, found, run: as of `no_layout`.
        hardware: of the GPUs.
        usable: bytes that a rank may use.
        costs: the cost model.
    """
    assert found.nearest is not None
    nearest = costs.evaluate(found.nearest)
    short = nearest.peak - usable
    head = (
        f"None of the {found.sound:,} sound layouts of {gpus:,} × {hardware.name} fits into {format_bytes(usable)}: "
        f"the nearest, {nearest.choice}, needs {format_bytes(nearest.peak)}, {format_bytes(short)} too much "
        f"({costs.largest_part(nearest.choice)})"
    )
    ways = [f"devices of {format_bytes(hardware.memory_bytes + short)}"]
    for key in fixed:
        if run(gpus, {other: value for other, value in fixed.items() if other != key}).ranked:
            ways.insert(0, f"no --fix {key}={_word(fixed[key])}")
    if (enough := _enough(gpus, fixed, run)) is not None:
        ways.insert(0, f"{enough:,} of them (--gpus {enough})")
    return UserError(f"{head}; it takes {' or '.join(ways)}.")


def _enough(gpus: int, fixed: Mapping[str, Any], run: Run) -> int | None:
    """The smallest of some larger numbers of GPUs with a layout that fits; None where none has one."""
    for times in _LARGER:
        if times > _LARGER[0] and gpus * times > _MOST:
            return None
        if run(gpus * times, fixed).ranked:
            between = [int(gpus * times * part) for part in _BETWEEN if gpus * times * part % 1 == 0]
            return next((count for count in between if run(count, fixed).fitting), gpus * times)
    return None


def _around(gpus: int) -> Iterator[int]:
    """The nearest numbers, the larger of two first."""
    for distance in range(1, _NEAR + 1):
        yield gpus + distance
        if gpus > distance:
            yield gpus - distance


def _powers_below(gpus: int) -> Iterator[int]:
    """Powers of two below a number, the largest first."""
    for power in range(gpus.bit_length() - 1, -1, -1):
        yield 1 << power


def _words(fixed: Mapping[str, Any]) -> str:
    return " and ".join(f"{key} {_word(value)}" for key, value in fixed.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
