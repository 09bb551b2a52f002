"""Steps whose loss or gradient is not finite, or a spike: where that began, and what follows (stop, skip, rollback)."""

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


class Response(NamedTuple):
    """What was done about a bad step.

    Attributes:
        reason: why it is bad, in words.
        start: updates of the checkpoint that was loaded; None where the step is skipped alone.
    """

    reason: str
    start: int | None = None


class BadSteps:
    """Responds to bad steps. Collective over the world, as its methods.

    Args:
        engine: the model and its update.
        loader: this replica's batches.
        saving: knows which checkpoints are good.
        store: loads them.
        policy: what follows.
    """

    def __init__(
        self, engine: Engine, loader: Loader, saving: SafeSaving, store: CheckpointStore, policy: AnomalyPolicy
    ) -> None:
        self._engine, self._loader, self._saving, self._store = engine, loader, saving, store
        self._policy = policy

    def not_finite(
        self, error: NonFiniteStep, batch: Any, done: int, loss: Tensor, streams: Mapping[str, Tensor]
    ) -> Response:
        """Find out where a loss or gradient norm that is not finite came from, and follow `train.on_nan`.

        Args:
            error: of the step.
            batch: this replica's samples.
            done: updates made before the step.
            loss: this rank's term of its mean loss.
            streams: the state of the random streams before the step.

        Raises:
            DivergenceError: the run is to end.
            HardwareFault: the same, where a second run of the step was finite.
        """
        found = diagnose(self._engine, self._loader, batch, done, loss, streams)
        clauses = [error.what, *found.clauses()]
        if not found.is_reproducible and self._policy.action("nan") == "stop":
            what = "; ".join([f"Training diverged at step {done + 1}: {clauses[0]}", *clauses[1:], self._saving.kept()])
            raise HardwareFault(f"{what}.", tuple(found.differing), done)
        return self._respond("nan", done + 1, clauses, [error.advice] if found.is_reproducible else [])

    def state_not_finite(self, step: int) -> Response | None:
        """Roll back where weights or optimizer state are not finite after `step`; None where they are finite.

        Raises:
            DivergenceError: the run is to end.
        """
        if self._store.is_finite():
            return None
        return self._respond("nan", step, ["weights or optimizer state are not finite after it"], [])

    def spike(self, reason: str, done: int) -> Response:
        """Follow `train.on_spike`.

        Args:
            reason: why the step is a spike.
            done: updates made before it.

        Raises:
            DivergenceError: the run is to end.
        """
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
