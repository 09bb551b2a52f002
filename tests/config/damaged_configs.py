"""Damaged configs made from the examples: flipped bits, moved lines, and values that nobody means."""

from pathlib import Path
from random import Random
from typing import Any

import yaml

from threefold.config.schema import section_settings

_EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
_NUMBERS = (0, -1, 1, 2, 3, 7, 1024, 65536, 10**6, 2**31, 2**63, 2**64 + 1, 10**20, 10**300, 0.5, -0.0, 1e-320, 1e308)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "x",
    "a\n b",
    [],
    [1, 2],
    {},
    {"a": 1},
)


def damaged_config(source: Random) -> bytes:
    """Return an example with some bytes, lines or values changed."""
    text = source.choice(_EXAMPLES).read_bytes()
    way = source.randrange(4)
    if way == 0:
        damaged = bytearray(text)
        for _ in range(source.randint(1, 5)):
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        return bytes(damaged)
    if way == 1:
        lines = text.splitlines(keepends=True)
        place = source.randrange(len(lines))
        part = lines[place : place + source.randint(1, 3)]
        edits = (
            [*lines[:place], *lines[place + 1 :]],
            [*lines, *part],
            [*part, *lines],
            [b"  " + line for line in lines],
        )
        return b"".join(source.choice(edits))[source.choice((0, 0, 1, 5)) :]
    values = yaml.safe_load(text)
    for _ in range(source.randint(1, 4)):
        section, settings = source.choice(list(section_settings().items()))
        key = source.choice(list(settings))
        inside = values.get(section)
        if source.random() < 0.1 or not isinstance(inside, dict | None):
            values[section] = source.choice(_VALUES)
        else:
            values[section] = {**(inside or {}), key: source.choice(_NUMBERS if way == 2 else _VALUES)}
    return yaml.safe_dump(values).encode()
