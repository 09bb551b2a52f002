"""Spikes: steps whose loss or gradient norm is far above what it was in the steps before.

PaLM (Chowdhery et al., arXiv 2204.02311, section 5.1) saw about 20 spikes of the loss in a run, went back to a
checkpoint about 100 steps before each, and skipped the 200 to 500 batches around it; the same batches made no spike
from another checkpoint. OPT-175B (Zhang et al., arXiv 2205.01068, section 2.5) went back likewise and lowered the
learning rate. Megatron-LM rejects a result that is more than 10 times the largest seen (`--check-for-spiky-loss`),
OLMo-core leaves updates out whose loss or norm is so many standard deviations above the mean of the last 128 steps. The
median used here is not moved by the spikes themselves.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median


class SpikeDetector:
    """Compares a step's loss and gradient norm with their medians over the last steps with an update.

    Args:
        factor: a step is a spike above so many times a median; None where none is.
        window: steps over which the medians are taken; before there are as many, none is a spike.

    Attributes:
        recent: loss and gradient norm of these steps, the newest last; empty without a factor.
    """

    def __init__(self, factor: float | None, window: int) -> None:
        self.factor, self.window = factor, window
        self.recent: deque[tuple[float, float]] = deque(maxlen=window)

    def reason(self, loss: float, norm: float) -> str:
        """Why a step is a spike, as a clause; empty where it is none."""
        if self.factor is None or len(self.recent) < self.window:
            return ""
        for name, value, known in zip(
            ("loss", "gradient norm"), (loss, norm), zip(*self.recent, strict=True), strict=True
        ):
            usual = median(known)
            if value > self.factor * usual > 0:
                return (
                    f"the {name} is {value:g}, more than {self.factor:g} (train.spike_factor) times {usual:g}, its "
                    f"median over the last {self.window} steps"
                )
        return ""

    def add(self, loss: float, norm: float) -> None:
        """Count a step with an update."""
        if self.factor is not None:
            self.recent.append((loss, norm))

    def restore(self, recent: Iterable[tuple[float, float]]) -> None:
        """Continue from the steps of a checkpoint."""
        self.recent.clear()
        if self.factor is not None:
            self.recent.extend(recent)
