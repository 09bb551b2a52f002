"""Patterns over the dotted names of modules, and which of several patterns decides for a name.

A pattern is a dotted name in which a part may be `*`, any one part, or `**`, one or more parts; inside a part `*` is
any characters of that part, as in `attn_*`.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from threefold.errors import UserError


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name fits a pattern: `blocks.3` fits `blocks.*`, and `blocks.3.attn` does not."""
    return _expression(pattern).fullmatch(name) is not None


def specificity(pattern: str) -> tuple[int, int, int, int]:
    """What patterns are compared by; of two, the larger is the more specific.

    More parts without a star; where those are equally many, more parts with a star inside; then more parts that are
    `*`; then fewer that are `**`.
    """
    parts = pattern.split(".")
    several, single = parts.count("**"), parts.count("*")
    literal = sum("*" not in part for part in parts)
    return literal, len(parts) - several - single - literal, single, -several


class Patterns:
    """Patterns of which each decides for the modules whose names it matches and for everything inside them, unless a
    more specific one does.

    Args:
        patterns: of `split`, in any order.

    Raises:
        UserError: one of them is no pattern.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._ranked = sorted(((specificity(each), each) for each in patterns), reverse=True)
        for _, pattern in self._ranked:
            _expression(pattern)

    def deciding(self, name: str) -> str | None:
        """The pattern that decides for a module; None where none matches it or a module around it.

        Raises:
            UserError: two do, and neither is more specific.
        """
        found: list[tuple[tuple[int, int, int, int], str]] = []
        for rank, pattern in self._ranked:
            if found and rank < found[0][0]:
                break
            if _covering(pattern).match(name):
                found.append((rank, pattern))
        if len(found) > 1:
            one, other = sorted(pattern for _, pattern in found[:2])
            raise UserError(
                f"split has {one!r} and {other!r}, which both match {name!r} and are equally specific; write one of "
                f"them with more of the name, such as {name!r}."
            )
        return found[0][1] if found else None

    def naming(self, name: str) -> str | None:
        """The pattern that decides for a module and matches its own name, not that of a module around it alone.

        Raises:
            UserError: as for `deciding`.
        """
        found = self.deciding(name)
        return found if found is not None and matches(name, found) else None


@lru_cache(4096)
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join(_part(part, pattern) for part in pattern.split(".")))


@lru_cache(4096)
def _covering(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{_expression(pattern).pattern})(?:\.|$)")


def _part(part: str, pattern: str) -> str:
    if part == "**":
        return r"[^.]+(?:\.[^.]+)*"
    if part == "*":
        return r"[^.]+"
    if not part or "**" in part:
        rule = "has an empty part" if not part else "has ** beside other characters"
        raise UserError(f"The pattern {pattern!r} {rule}; write it as in 'blocks.*.mlp.up' or 'blocks.**'.")
    return re.escape(part).replace(r"\*", "[^.]*")
