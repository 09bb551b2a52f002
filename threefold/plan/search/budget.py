"""What a number of tokens takes: steps, days, GPU-hours and dollars."""

import re
from dataclasses import dataclass
from typing import Final

from threefold.errors import UserError
from threefold.files import shown

_SCALES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS: Final = re.compile(r"(\d+(?:\.\d+)?(?:E\d{1,2})?)([KMBT]?)")
_HOUR, _DAY = 3600, 86400


@dataclass(frozen=True)
class Budget:
    """Training on so many tokens.

    Attributes:
        tokens: of them.
        steps: of the config's global batch, rounded up.
        seconds: of these steps.
        gpus: that compute them.
        dollars_per_hour: of a GPU; None where it is not known.
    """

    tokens: int
    steps: int
    seconds: float
    gpus: int
    dollars_per_hour: float | None

    @property
    def days(self) -> float:
        return self.seconds / _DAY

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / _HOUR

    @property
    def dollars(self) -> float | None:
        return None if self.dollars_per_hour is None else self.gpu_hours * self.dollars_per_hour


def parse_tokens(text: str) -> int:
    """A number of tokens such as `300B`, `1.4T`, `20e9` or `5000000`.

    Raises:
        UserError: it is none.
    """
    match = _TOKENS.fullmatch(text.strip().upper().replace("_", "").replace(",", ""))
    count = round(float(match[1]) * _SCALES[match[2]]) if match else 0
    if not match or not 0 < count <= 10**18:
        raise UserError(f"--tokens is {shown(text)} but must be a number of tokens above 0; write it as 300B or 1.4T.")
    return count


def budget_of(tokens: int, tokens_per_step: int, step_seconds: float, gpus: int, dollars: float | None) -> Budget:
    """The budget of whole steps.

    Args:
        tokens: to train on.
        tokens_per_step: of the global batch.
        step_seconds: of a step.
        gpus: that compute it.
        dollars: per hour and GPU.
    """
    steps = -(-tokens // tokens_per_step)
    return Budget(tokens, steps, steps * step_seconds, gpus, dollars)
