"""Outcome of a command that a test ran."""

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    status: int
    output: str
    error: str


Command = Callable[..., Ended]
