"""Errors of the settings, told to the caller of a function: whose arguments have the settings' names."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from threefold.errors import UserError

_SECTION = re.compile(r"\b(?:parallel|train|precision|optimizer)\.(?=[a-z_])")


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Within the block a `UserError` names arguments: `tp` where a run from a config says `parallel.tp`."""
    try:
        yield
    except UserError as error:
        raise UserError(_SECTION.sub("", str(error))) from None
