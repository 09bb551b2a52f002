"""Settings of training on preferences (DPO)."""

from typing import Any, Literal

from pydantic import Field

from threefold.config.section import Section


class PreferenceConfig(Section):
    """Direct preference optimization (DPO, arXiv 2305.18290) on pairs of a chosen and a rejected answer."""

    beta: float = Field(default=0.0, ge=0)
    """Factor of the difference of log-probabilities from those of the starting weights, 0.1 say; smaller values let the
    model depart further from them. 0 for no preferences (docs/guides/preferences.md)."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair: `sigmoid` is DPO's; `ipo` is that of arXiv 2310.12036 on means over the tokens of an answer, with
    `beta` for its τ."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For `sigmoid`: assumed fraction of pairs whose answers are swapped (conservative DPO)."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that have a value; none if all have their defaults."""
        found = super().settings()
        return {} if self == type(self)() else found
