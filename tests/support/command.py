"""How a command of the tests ended."""

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    output: str
    error: str


Command = Callable[..., Ended]
