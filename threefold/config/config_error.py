"""The error of an invalid setting, in one sentence."""

from typing import Any

from threefold.config.schema import Config
from threefold.errors import UserError
from threefold.files import shown

_UNSET = object()


def problem(config: Config, key: str, rule: str, value: Any = _UNSET) -> UserError:
    """The error that `key` (`section.name`) breaks `rule`, which is what follows 'but'.

    Args:
        config: of the setting; has the line it was set on.
        key: `section.name`.
        rule: the rule and the nearest value that works.
        value: what the setting is, when that is a default that `config` does not hold yet.
    """
    section, name = key.split(".")
    value = getattr(getattr(config, section), name) if value is _UNSET else value
    text = str(list(value) if isinstance(value, tuple) else value)
    return UserError(
        f"{config.origin(key)}{key} is {shown(text.lower() if isinstance(value, bool) else text)} but {rule}."
    )
