"""Threefold: train GPT-style language models in any data × tensor × pipeline layout, with the same result.

Everything that the command line does can be done from Python with the names of this module. They are imported when
they are first used: `import threefold` alone needs no torch, which takes seconds to import.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold.config import load_config
    from threefold.errors import UserError

__version__ = "0.1.0"

__all__ = [
    "UserError",
    "load_config",
]

_MODULES: Final = {
    "UserError": "errors",
    "load_config": "config",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        close = get_close_matches(name, _MODULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
