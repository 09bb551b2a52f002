"""Dynamic loss scaling of fp16 training.

Small gradients vanish below fp16's smallest number, 6e-8. So the loss is multiplied by a large number before the
backward pass, and the gradients divided by it after (Micikevicius et al., "Mixed precision training", arXiv
1710.03740, section 3.2). The scale is as large as it can be: it halves where the gradients overflow, and doubles after
enough steps in which they do not.
"""

from threefold.config import PrecisionConfig

LEAST = 1.0
"""The smallest scale; gradients that overflow at this one overflow unscaled."""


class LossScale:
    """The scale, and for how many steps without overflow; the same on every rank, as all have the same gradient norm.

    Args:
        initial: of the first step, a power of two, so that multiplying and dividing round nothing.
        window: steps without overflow after which it doubles.

    Attributes:
        value: of the coming step.
        good_steps: without overflow, since it last changed.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.window = window
        self.value, self.good_steps = initial, 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale | None":
        """That of a run; None without loss scaling, which no precision but fp16 needs."""
        return cls(config.loss_scale, config.loss_scale_window) if config.dtype == "fp16" else None

    @property
    def is_least(self) -> bool:
        """Whether it cannot halve any more."""
        return self.value <= LEAST

    def overflowed(self) -> None:
        """The gradients of a step were not finite: halve."""
        self.value, self.good_steps = max(LEAST, self.value / 2), 0

    def held(self) -> None:
        """The gradients of a step were finite: double after `window` such steps."""
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value, self.good_steps = self.value * 2, 0
