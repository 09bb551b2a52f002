"""Errors that the user can correct, each one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in one of the user's settings, options or files.

    The message is one sentence: the setting, its value, the rule it breaks and the nearest value that works. The
    command line prints it once, without a traceback.
    """


class HardwareFault(UserError):
    """Silent failure of the memory or arithmetic of one of `ranks`, found after `step` updates; raised on every rank.

    No setting is wrong, so restarting from the newest checkpoint may succeed.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), step: int = 0) -> None:
        super().__init__(message)
        self.ranks, self.step = ranks, step


class DivergenceError(UserError):
    """Error of a loss, gradient or weights that are not finite, when a smaller loss scale would not help."""


class ProcessFault(UserError):
    """Limit reached by a process, such as its open files; restarting the run may succeed."""


class PeerLostError(ConnectionError):
    """A process of a group ended while this one was waiting for it; the message begins with its rank."""

    @property
    def rank(self) -> int | None:
        """Rank that ended; None if the message does not begin with it."""
        found = re.match(r"rank (\d+) ended", str(self))
        return int(found[1]) if found else None


class OutputLost(UserError):
    """Standard output that was closed by its reader, or is on a full disk."""


CLOSED_OUTPUT = "Standard output was closed by the program that read it."
"""Message of an `OutputLost` that ends the command silently, as a closed pipe ends other programs."""


def require_whole(name: str, value: object, least: int = 1, use: int | None = None) -> None:
    """Raise a `UserError` unless an argument is a whole number of at least `least`; `use` is a value that works."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        works = least if use is None else use
        raise UserError(f"{name} is {value!r} but must be a whole number of at least {least}; use {works}.")


_SECTION = re.compile(r"\b(?:parallel|train|precision|optimizer)\.(?=[a-z_])")


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Make a `UserError` raised in the block name arguments (`tp`) rather than config keys (`parallel.tp`)."""
    try:
        yield
    except UserError as error:
        raise UserError(_SECTION.sub("", str(error))) from None
