"""Goals of the planner's benchmark, and the results."""

from typing import NamedTuple


class Goal(NamedTuple):
    """Limit on an error of the planner.

    Attributes:
        what: measured quantity, in words.
        found: measured value.
        limit: value to reach.
        at_least: whether the limit is the smallest good value rather than the largest.
        unit: unit of both values: `%` prints shares as percentages, anything else follows the number.
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
        """Return the cells of a table row: quantity, result, goal, and whether it is met."""
        sign = "≥" if self.at_least else "≤"
        return self.what, self._text(self.found), f"{sign} {self._text(self.limit)}", "yes" if self.is_met else "NO"

    def _text(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "%" else f"{value:.4g} {self.unit}".strip()
