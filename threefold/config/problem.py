"""The one sentence about a setting that cannot be."""

from typing import Any

from threefold.config.schema import Config
from threefold.errors import UserError

_UNSET = object()


def problem(config: Config, key: str, rule: str, value: Any = _UNSET) -> UserError:
    """The error that `key` (`section.name`) breaks `rule`, which is what follows 'but'.

    Args:
        config: whose setting it is; knows the line it was set on.
        key: `section.name`.
        rule: the rule and the nearest value that works.
        value: what the setting is, when that is a default that `config` does not hold yet.
    """
    section, name = key.split(".")
    shown = getattr(getattr(config, section), name) if value is _UNSET else value
    shown = list(shown) if isinstance(shown, tuple) else shown
    return UserError(f"{config.origin(key)}{key} is {shown} but {rule}.")


def nearest_multiple(value: int, divisor: int) -> int:
    """The positive multiple of `divisor` nearest to `value`."""
    return max(1, round(value / divisor)) * divisor


def nearest_divisor(value: int, number: int) -> int:
    """The divisor of `number` nearest to `value`, the smaller of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - value), d))
