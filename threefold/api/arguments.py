"""The arguments of a model's constructor, given by name."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from threefold.errors import UserError


def with_arguments(model: Callable[..., Any], arguments: Mapping[str, Any] | None) -> Callable[[], Any]:
    """What makes a model, with the keyword arguments of its constructor bound.

    Raises:
        UserError: it does not take one of them, or needs further ones.
    """
    given = dict(arguments or {})
    name = getattr(model, "__name__", type(model).__name__)
    try:
        signature = inspect.signature(model)
    except ValueError:  # of a class that is not written in Python
        return partial(model, **given)
    takes = {each.name: each for each in signature.parameters.values() if each.kind in _BY_NAME}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    for each in given:
        if each not in takes and not takes_any:
            close = get_close_matches(each, takes, n=1)
            near = f"the nearest is {close[0]!r}" if close else "leave it out"
            raise UserError(f"arguments has {each!r}, which {name} does not take; {near}.")
    for parameter in takes.values():
        if parameter.default is parameter.empty and parameter.name not in given:
            raise UserError(f"{name} needs the argument {parameter.name}; give arguments={{{parameter.name!r}: …}}.")
    return partial(model, **given) if given else model


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
