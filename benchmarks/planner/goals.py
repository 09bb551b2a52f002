"""What a section of the planner's benchmark has to reach, and what it reached."""

from typing import NamedTuple


class Goal(NamedTuple):
    """A limit on an error of the planner.

    Attributes:
        what: is measured, in words.
        found: its value.
        limit: the value that it must reach.
        at_least: whether the limit is the smallest good value, not the largest.
        unit: of both: `%` prints shares as percentages, anything else is printed after the number.
    """

    what: str
    found: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def cells(self) -> tuple[str, str, str, str]:
        """Of a table: what, found, goal, whether it is met."""
        sign = "≥" if self.at_least else "≤"
        return self.what, self._text(self.found), f"{sign} {self._text(self.limit)}", "yes" if self.is_met else "NO"

    def _text(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "%" else f"{value:.4g} {self.unit}".strip()
