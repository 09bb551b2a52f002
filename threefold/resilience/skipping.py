"""Steps that make no update: those skipped on purpose or by a rollback, and spikes of the loss or the gradient norm.

These decide before and within each step; `threefold.resilience.anomalies` decides what follows a bad step.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.config import Config
from threefold.config.data import StepRanges
from threefold.train.callbacks.base import Guard
from threefold.train.callbacks.records import StepRecord


class SpikeDetector:
    """Detector of loss and gradient-norm spikes, relative to the medians of the last steps that made an update.

    Args:
        factor: multiple of a median above which a step is a spike; None to detect none.
        window: number of steps of the medians; until that many have been seen, no step is a spike.
        recent: these steps so far, from a checkpoint.

    Attributes:
        recent: loss and gradient norm of these steps, the newest last; empty without a factor.
    """

    def __init__(self, factor: float | None, window: int, recent: Iterable[tuple[float, float]] = ()) -> None:
        self.factor, self.window = factor, window
        self.recent: deque[tuple[float, float]] = deque(maxlen=window)
        self.restore(recent)

    def reason(self, loss: float, norm: float) -> str:
        """Return why a step is a spike, as a clause; empty if it is none."""
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
        """Add a step that made an update."""
        if self.factor is not None:
            self.recent.append((loss, norm))

    def restore(self, recent: Iterable[tuple[float, float]]) -> None:
        """Continue from the steps recorded in a checkpoint."""
        self.recent.clear()
        if self.factor is not None:
            self.recent.extend(recent)


class SkippedSteps(Guard):
    """Guard that skips steps on purpose (`data.skip_steps`) and after a rollback, and refuses spikes.

    A skipped step makes no update and leaves the optimizer state unchanged, including the step count of Adam's bias
    correction. The global step counter advances, so all other steps keep their learning rate, samples and dropout.

    Args:
        config: resolved config.
        facts: record of the run's bad steps up to its starting point; None for a new run.
    """

    def __init__(self, config: Config, facts: AnomalyFacts | None = None) -> None:
        facts = facts or AnomalyFacts()
        self._train, self._on_purpose = config.train, config.data.skipped
        self._rolled_back = StepRanges(facts.skipped)
        self._skipped = StepRanges.of([*self._on_purpose.ranges, *facts.skipped])
        self._bad: dict[int, str] = {}
        self._skips, self._consecutive, self._rollbacks = facts.skips, facts.consecutive, facts.rollbacks
        self.spikes = SpikeDetector(config.train.spike_factor, config.train.spike_window, facts.recent)

    def skipped_for(self, step: int) -> str:
        if not self._skipped.ranges or step not in self._skipped:
            return ""
        if (found := self._on_purpose.around(step)) is not None:
            return f"data.skip_steps has {_words(found)}"
        if step in self._bad:
            return self._bad[step]
        found = self._rolled_back.around(step)
        assert found is not None
        return f"a rollback skips {_words(found)}"

    def next_step(self, step: int) -> int:
        return self._skipped.next_outside(step) if self._skipped.ranges else step

    def refuses(self, loss: float, norm: float) -> str:
        return self.spikes.reason(loss, norm)

    def after_step(self, record: StepRecord) -> None:
        if not record.skipped:
            self.updated(record.loss, record.grad_norm)

    def updated(self, loss: float, norm: float) -> None:
        """Count a step that made an update."""
        self._consecutive = 0
        self.spikes.add(loss, norm)

    def facts(self) -> AnomalyFacts | None:
        """Return the state to store in a checkpoint; None if there is nothing to remember."""
        facts = AnomalyFacts(
            self._rolled_back.ranges, self._skips, self._consecutive, self._rollbacks, tuple(self.spikes.recent)
        )
        return None if facts == AnomalyFacts() else facts

    def rolled_back(self, step: int, start: int, reason: str, facts: AnomalyFacts | None) -> None:
        """Mark the steps that led to bad `step` as skipped, after loading the checkpoint of `start` updates."""
        count = self._train.rollback_steps
        first = start + 1 if count is None else max(start + 1, step - count + 1)
        self._rolled_back = self._rolled_back.with_range(first, step)
        self._skipped = self._skipped.with_range(first, step)
        self._bad[step] = f"a rollback to step {start} skips {_words((first, step))}: {reason}"
        self._consecutive = 0
        self.spikes.restore(() if facts is None else facts.recent)


def _words(found: tuple[int, int]) -> str:
    first, last = found
    return f"step {first}" if first == last else f"steps {first} to {last}"
