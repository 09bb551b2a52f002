"""Layouts in words, and pairwise arrays of them: data of the tests that compare every layout with one process."""

import re
from dataclasses import replace
from typing import Any

from tests.support.pairwise import Row
from tests.support.parity import Case
from threefold.comm.layout import parse

AXES: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 4),
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "cp": (1, 2, 4),
    "sp": ("", "sp"),
    "schedule": ("", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"),
    "zero": ("", "zero1", "zero2", "zero3", "zero3 shards2"),
    "ep": (1, 2, 4),
    "recompute": ("", "selective", "full"),
    "transport": ("", "sockets"),
}
_NUMBERS = ("ep", "micro", "chunk")


def goes_together(row: Row, batch: int, micro_batches: int) -> bool:
    """Return whether a row is a layout of two to eight ranks, whose replicas run so many micro-batches."""
    is_mixture, schedule, zero = "mixture" in row["family"], row["schedule"], row["zero"]
    return (
        1 < row["dp"] * row["tp"] * row["pp"] * row["cp"] <= 8
        and batch % (row["dp"] * micro_batches) == 0
        and (row["tp"] > 1 or not row["sp"])
        and (row["pp"] > 1 or not schedule)
        and micro_batches >= (2 * row["pp"] if schedule else row["pp"])
        and (not zero or (row["dp"] * row["cp"] > 1 and schedule in ("", "interleaved", "looped-bfs")))
        and (row["dp"] in (4, 8) or "shards" not in zero)
        and (row["ep"] == 1 or (is_mixture and row["dp"] % row["ep"] == 0))
    )


def in_words(row: Row) -> str:
    """Return the words of a row's layout."""
    sizes = ",".join(f"{axis}{row[axis]}" for axis in ("dp", "tp", "pp", "cp") if row[axis] > 1)
    others = (row[key] for key in ("method", "schedule", "zero", "sp", "recompute", "transport") if key in row)
    numbers = (f"{key}{row[key]}" for key in _NUMBERS if row.get(key, 0) > (key != "chunk"))
    return " ".join(filter(None, (sizes, *others, *numbers)))


def laid_out(case: Case, words: str) -> Case:
    """Return the case in a layout: words of `threefold verify`, and `ep2`, `chunk5` (of the loss), `micro4` or
    `sockets`; `micro` is the number of micro-batches."""
    numbers = {name: int(number) for name, number in re.findall(rf"\b({'|'.join(_NUMBERS)})(\d+)\b", words)}
    spec = parse(re.sub(rf"\b(({'|'.join(_NUMBERS)})\d+|sockets)\b", "", words) or "dp1")
    settings = {key: value for key, value in spec.settings if key != "parallel.schedule"}
    if "ep" in numbers:
        settings["parallel.ep"] = numbers["ep"]
    if "chunk" in numbers:
        settings["train.loss_chunk_size"] = numbers["chunk"]
    made = replace(
        case,
        **{axis: spec.layout.size(axis) for axis in ("dp", "tp", "pp", "cp")},
        schedule=spec.setting("parallel.schedule", "1f1b"),
        settings=tuple((dict(case.settings) | settings).items()),
        shared_memory="sockets" not in words,
    )
    return replace(made, accumulation=numbers["micro"]) if "micro" in numbers else made
