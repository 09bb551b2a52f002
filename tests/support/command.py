"""Outcome of a command that a test ran, and a display of progress that shows nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Ended(NamedTuple):
    status: int
    output: str
    error: str


Command = Callable[..., Ended]


class Silent:
    """Progress that is noted and not shown: name, bytes and bytes so far of each phase."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []

    def phase(self, name: str, total_bytes: int) -> None:
        self.phases.append([name, total_bytes, 0])

    def advance(self, read_bytes: int) -> None:
        self.phases[-1][2] += read_bytes
