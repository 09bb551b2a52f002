"""Which steps a run skips, and what follows a bad one: the same on every rank, and after every resume."""

from typing import Literal

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.config import Config
from threefold.config.data import StepRanges
from threefold.train.anomalies.spikes import SpikeDetector

Kind = Literal["nan", "spike"]


class AnomalyPolicy:
    """The settings `data.skip_steps`, `train.on_nan` and `train.on_spike` with their limits, and what has been counted.

    A skipped step makes no update and leaves the optimizer state as it is, also the number of updates that Adam
    corrects its averages by. The step counter goes on: the learning rate, the samples and the dropout of every other
    step are those that they would have been.

    Args:
        config: resolved.

    Attributes:
        spikes: tells spikes.
    """

    def __init__(self, config: Config) -> None:
        self._train, self._on_purpose = config.train, config.data.skipped
        self._rolled_back = StepRanges()
        self._bad: dict[int, str] = {}
        self._skips = self._consecutive = self._rollbacks = 0
        self.spikes = SpikeDetector(config.train.spike_factor, config.train.spike_window)

    def facts(self) -> AnomalyFacts | None:
        """What a checkpoint stores; None where there is nothing to remember."""
        facts = AnomalyFacts(
            self._rolled_back.ranges, self._skips, self._consecutive, self._rollbacks, tuple(self.spikes.recent)
        )
        return None if facts == AnomalyFacts() else facts

    def resume(self, facts: AnomalyFacts | None) -> None:
        """Continue from the facts of a checkpoint."""
        facts = facts or AnomalyFacts()
        self._rolled_back = StepRanges(facts.skipped)
        self._skips, self._consecutive, self._rollbacks = facts.skips, facts.consecutive, facts.rollbacks
        self.spikes.restore(facts.recent)

    def skipped_for(self, step: int) -> str:
        """Why a step (1 for the first) is not made at all, in words; empty where it is."""
        if (found := self._on_purpose.around(step)) is not None:
            return f"data.skip_steps has {_words(found)}"
        if step in self._bad:
            return self._bad[step]
        if (found := self._rolled_back.around(step)) is not None:
            return f"a rollback skips {_words(found)}"
        return ""

    def next_step(self, step: int) -> int:
        """The first step from `step` on that is made."""
        return self._all().next_outside(step)

    @property
    def rolls_back(self) -> bool:
        """Whether a rollback follows what is not finite."""
        return self.action("nan") == "rollback"

    def action(self, kind: Kind) -> str:
        """What follows a bad step: `stop`, `skip` or `rollback`."""
        return self._train.on_nan if kind == "nan" else self._train.on_spike

    def updated(self, loss: float, norm: float) -> None:
        """Count a step with an update."""
        self._consecutive = 0
        self.spikes.add(loss, norm)

    def skip(self, kind: Kind) -> str:
        """Count a step that is skipped; returns the limit that is passed by it, as a clause, if one is."""
        self._skips += 1
        self._consecutive += 1
        in_a_row, most = self._train.max_consecutive_skips, self._train.max_skipped_steps
        if self._consecutive > in_a_row:
            return f"train.on_{kind} is skip, and train.max_consecutive_skips allows {in_a_row} skipped steps in a row"
        if self._skips > most:
            return f"train.on_{kind} is skip, and train.max_skipped_steps allows {most} skipped steps in a run"
        return ""

    def roll_back(self, kind: Kind) -> str:
        """Count a rollback; returns the limit that is passed by it, as a clause, if one is."""
        self._rollbacks += 1
        most = self._train.max_rollbacks
        return f"train.on_{kind} is rollback, and train.max_rollbacks allows {most}" if self._rollbacks > most else ""

    def rolled_back(self, step: int, start: int, reason: str, facts: AnomalyFacts | None) -> None:
        """Skip the steps that led to a bad one.

        Args:
            step: the bad one.
            start: updates that the checkpoint has.
            reason: why it is bad.
            facts: of the checkpoint.
        """
        count = self._train.rollback_steps
        first = start + 1 if count is None else max(start + 1, step - count + 1)
        self._rolled_back = self._rolled_back.with_range(first, step)
        self._bad[step] = f"a rollback to step {start} skips {_words((first, step))}: {reason}"
        self._consecutive = 0
        self.spikes.restore(() if facts is None else facts.recent)

    def _all(self) -> StepRanges:
        return StepRanges.of([*self._on_purpose.ranges, *self._rolled_back.ranges])


def _words(found: tuple[int, int]) -> str:
    first, last = found
    return f"step {first}" if first == last else f"steps {first} to {last}"
