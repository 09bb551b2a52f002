"""Bad steps (non-finite loss or gradient, or a spike): detect them, find their origin, and stop, skip or roll back."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from torch import Tensor

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.config import Config
from threefold.config.data import StepRanges
from threefold.data.loader import Loader
from threefold.data.samples import ConsumedSamples
from threefold.errors import HardwareFault
from threefold.train.diagnosis import diagnose
from threefold.train.divergence import CheckpointStore, DivergenceError, SafeSaving
from threefold.train.step import Engine, NonFiniteStep


class SpikeDetector:
    """Detector of loss and gradient-norm spikes, relative to the medians of the last steps that made an update.

    Args:
        factor: multiple of a median above which a step is a spike; None to detect none.
        window: number of steps of the medians; until that many have been seen, no step is a spike.

    Attributes:
        recent: loss and gradient norm of these steps, the newest last; empty without a factor.
    """

    def __init__(self, factor: float | None, window: int) -> None:
        self.factor, self.window = factor, window
        self.recent: deque[tuple[float, float]] = deque(maxlen=window)

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


Kind = Literal["nan", "spike"]


class AnomalyPolicy:
    """Policy of `data.skip_steps`, `train.on_nan` and `train.on_spike` with their limits, and its counters.

    A skipped step makes no update and leaves the optimizer state unchanged, including the step count of Adam's bias
    correction. The global step counter advances, so all other steps keep their learning rate, samples and dropout.
    """

    def __init__(self, config: Config) -> None:
        self._train, self._on_purpose = config.train, config.data.skipped
        self._rolled_back = StepRanges()
        self._bad: dict[int, str] = {}
        self._skips = self._consecutive = self._rollbacks = 0
        self.spikes = SpikeDetector(config.train.spike_factor, config.train.spike_window)

    def facts(self) -> AnomalyFacts | None:
        """Return the state to store in a checkpoint; None if there is nothing to remember."""
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
        """Return why a step (1 for the first) is skipped without reading its samples; empty if it is not."""
        if (found := self._on_purpose.around(step)) is not None:
            return f"data.skip_steps has {_words(found)}"
        if step in self._bad:
            return self._bad[step]
        if (found := self._rolled_back.around(step)) is not None:
            return f"a rollback skips {_words(found)}"
        return ""

    def next_step(self, step: int) -> int:
        """Return the first step from `step` on that is not skipped."""
        return self._all().next_outside(step)

    @property
    def rolls_back(self) -> bool:
        """Whether a non-finite value leads to a rollback."""
        return self.action("nan") == "rollback"

    def action(self, kind: Kind) -> str:
        """Return the response to a bad step: `stop`, `skip` or `rollback`."""
        return self._train.on_nan if kind == "nan" else self._train.on_spike

    def updated(self, loss: float, norm: float) -> None:
        """Count a step that made an update."""
        self._consecutive = 0
        self.spikes.add(loss, norm)

    def skip(self, kind: Kind) -> str:
        """Count a skipped step; return the limit that it exceeds, as a clause, or an empty string."""
        self._skips += 1
        self._consecutive += 1
        in_a_row, most = self._train.max_consecutive_skips, self._train.max_skipped_steps
        if self._consecutive > in_a_row:
            return f"train.on_{kind} is skip, and train.max_consecutive_skips allows {in_a_row} skipped steps in a row"
        if self._skips > most:
            return f"train.on_{kind} is skip, and train.max_skipped_steps allows {most} skipped steps in a run"
        return ""

    def roll_back(self, kind: Kind) -> str:
        """Count a rollback; return the limit that it exceeds, as a clause, or an empty string."""
        self._rollbacks += 1
        most = self._train.max_rollbacks
        return f"train.on_{kind} is rollback, and train.max_rollbacks allows {most}" if self._rollbacks > most else ""

    def rolled_back(self, step: int, start: int, reason: str, facts: AnomalyFacts | None) -> None:
        """Mark the steps that led to bad `step` as skipped, after loading the checkpoint of `start` updates."""
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


class Response(NamedTuple):
    """Response to a bad step.

    Attributes:
        reason: why the step is bad, in words.
        start: updates of the checkpoint that was loaded; None if only the step is skipped.
    """

    reason: str
    start: int | None = None


class BadSteps:
    """Handler of bad steps: each method returns its response, or raises a `DivergenceError` if the run must end.

    All methods are collective over the world.
    """

    def __init__(
        self, engine: Engine, loader: Loader, saving: SafeSaving, store: CheckpointStore, policy: AnomalyPolicy
    ) -> None:
        self._engine, self._loader, self._saving, self._store = engine, loader, saving, store
        self._policy = policy

    def not_finite(
        self, error: NonFiniteStep, batch: Any, done: int, loss: Tensor, streams: Mapping[str, Tensor]
    ) -> Response:
        """Diagnose a non-finite loss or gradient norm, and follow `train.on_nan`.

        Args:
            error: error of the step.
            batch: this replica's samples.
            done: updates made before the step.
            loss: this rank's term of the step's mean loss.
            streams: state of the random streams before the step.

        Raises:
            HardwareFault: the run must end, and a second run of the step was finite.
        """
        found = diagnose(self._engine, self._loader, batch, done, loss, streams)
        clauses = [error.what, *found.clauses()]
        if not found.is_reproducible and self._policy.action("nan") == "stop":
            what = "; ".join([f"Training diverged at step {done + 1}: {clauses[0]}", *clauses[1:], self._saving.kept()])
            raise HardwareFault(f"{what}.", tuple(found.differing), done)
        return self._respond("nan", done + 1, clauses, [error.advice] if found.is_reproducible else [])

    def state_not_finite(self, step: int) -> Response | None:
        """Roll back if weights or optimizer state are not finite after `step`; return None if they are finite."""
        if self._store.is_finite():
            return None
        return self._respond("nan", step, ["weights or optimizer state are not finite after it"], [])

    def spike(self, reason: str, done: int) -> Response:
        """Follow `train.on_spike`, given why the step after `done` updates is a spike."""
        return self._respond("spike", done + 1, [reason], [])

    def _respond(self, kind: Kind, step: int, clauses: Sequence[str], advice: Sequence[str]) -> Response:
        action, reason = self._policy.action(kind), "; ".join(clauses)
        if action == "stop":
            raise self._ended(kind, step, reason, advice)
        limit = self._policy.skip(kind) if action == "skip" else self._policy.roll_back(kind)
        if limit:
            raise self._ended(kind, step, reason, [limit, *advice])
        if action == "skip":
            return Response(reason)
        path = self._saving.roll_back()
        if path is None:
            rule = f"train.on_{kind} is rollback, and there is no good checkpoint to go back to"
            raise self._ended(kind, step, reason, [rule, *advice])
        facts = self._store.load(path)
        size = self._engine.config.train.global_batch_size
        self._loader.consumed = ConsumedSamples(size, facts.step, facts.consumed_samples)
        self._policy.rolled_back(step, facts.step, reason, facts.anomalies)
        return Response(reason, facts.step)

    def _ended(self, kind: Kind, step: int, reason: str, more: Sequence[str]) -> DivergenceError:
        begins = "Training diverged" if kind == "nan" else "Training was stopped"
        return self._saving.explained(DivergenceError("; ".join([f"{begins} at step {step}: {reason}", *more])))
