"""Errors for the user to correct, each in one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in a setting, an option or a file of the user.

    The message is one sentence that names the setting, its value, the rule it breaks and the nearest value that works.
    The command line prints it once, without a traceback.
    """


class HardwareFault(UserError):
    """A rank's memory or arithmetic has failed without an error of its own; the same on every rank.

    Nothing in the user's settings is wrong: a run that starts again from its newest checkpoint may go well.

    Attributes:
        ranks: at fault, or those of which one is.
        step: updates made when it was found.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), step: int = 0) -> None:
        super().__init__(message)
        self.ranks, self.step = ranks, step


class ProcessFault(UserError):
    """A process has come to a limit of its own, as that of its open files; a run that starts again may go well."""


class OutputLost(UserError):
    """Standard output was closed by its reader, or is on a full disk."""


CLOSED_OUTPUT = "Standard output was closed by the program that read it."
"""The message of an `OutputLost` that ends a command silently, as it ends other programs."""


_SECTION = re.compile(r"\b(?:parallel|train|precision|optimizer)\.(?=[a-z_])")


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Within the block a `UserError` names arguments: `tp` where a run from a config says `parallel.tp`."""
    try:
        yield
    except UserError as error:
        raise UserError(_SECTION.sub("", str(error))) from None
