"""Sentences of wrong calls, as a user sees them."""

from collections.abc import Callable
from typing import Any

from threefold.errors import UserError


def sentence(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the sentence that a call is refused with; empty if it is not."""
    try:
        call(*args, **options)
    except UserError as error:
        return str(error)
    return ""
