"""Response to a bad step (non-finite loss or gradient, or a spike): find its origin, and stop, skip or roll back.

A *fault policy* chooses among the three: a function that gets a `Fault` and returns an `Action`. It is one function
here and one row in `config/schema.py`, or an entry point of the group `threefold.fault_policies` in another package, or
an import path. All ranks call it with equal values and must get the same action.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.config import Config
from threefold.config.schema import ON_NAN, ON_SPIKE
from threefold.data.loader import Loader
from threefold.data.order import ConsumedSamples, read_by_step
from threefold.errors import DivergenceError, HardwareFault, UserError
from threefold.files import shown
from threefold.plugins import one_of
from threefold.resilience.diagnosis import diagnose
from threefold.resilience.rules import StepRanges
from threefold.train.callbacks.base import BadStep, Guard, Response
from threefold.train.callbacks.records import StepRecord
from threefold.train.saving import SafeSaving
from threefold.train.step import Engine

Kind = Literal["nan", "spike"]
Action = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class Fault:
    """Bad step, as a fault policy sees it; the same on every rank.

    Attributes:
        kind: `nan` for a loss, gradient norm or state that is not finite, `spike` for a spike.
        step: 1 for the first.
        reason: why the step is bad, in words.
        is_reproducible: whether a second run of the step was bad too, or gave the same bits; True for a spike.
        updated: whether the update was made, so that the state itself is bad and skipping does not help.
        skips, rollbacks: steps that the run has skipped, and rollbacks that it has made so far.
        consecutive: skipped steps directly before this one.
    """

    kind: Kind
    step: int
    reason: str
    is_reproducible: bool = True
    updated: bool = False
    skips: int = 0
    consecutive: int = 0
    rollbacks: int = 0


FaultPolicy = Callable[[Fault], Action]


def stop(fault: Fault) -> Action:
    """End the run, with a sentence that says where the bad value began."""
    return "stop"


def skip(fault: Fault) -> Action:
    """Make no update in this step, and continue with the next."""
    return "skip"


def rollback(fault: Fault) -> Action:
    """Load the last good checkpoint, skip the steps since then, and continue."""
    return "rollback"


class AnomalyPolicy(Guard):
    """Guard that skips steps on purpose (`data.skip_steps`) and after a rollback, and refuses spikes.

    It also holds the policies of `train.on_nan` and `train.on_spike` with their limits, and counts what they did. A
    skipped step makes no update and leaves the optimizer state unchanged, including the step count of Adam's bias
    correction. The global step counter advances, so all other steps keep their learning rate, samples and dropout.

    `facts` is the record of the run's bad steps up to its starting point; None for a new run. Raises a `UserError` if a
    fault policy of another package cannot be imported.
    """

    def __init__(self, config: Config, facts: AnomalyFacts | None = None) -> None:
        facts = facts or AnomalyFacts()
        self._train, self._on_purpose = config.train, StepRanges.parse(config.data.skip_steps or ())
        self._rolled_back = StepRanges(facts.skipped)
        self._skipped = StepRanges.of([*self._on_purpose.ranges, *facts.skipped])
        self._bad: dict[int, str] = {}
        self._skips, self._consecutive, self._rollbacks = facts.skips, facts.consecutive, facts.rollbacks
        self._detector = partial(SpikeDetector, config.train.spike_factor, config.train.spike_window)
        self.spikes = self._detector(facts.recent)
        self._chosen: dict[Kind, FaultPolicy] = {
            "nan": ON_NAN.load(config.train.on_nan),
            "spike": ON_SPIKE.load(config.train.on_spike),
        }

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
        self.spikes = self._detector(() if facts is None else facts.recent)

    def action(self, kind: Kind, step: int, reason: str, is_reproducible: bool = True, updated: bool = False) -> Action:
        """Return the chosen policy's action for a bad step; raise a `UserError` if it is not an action."""
        counts = self._skips, self._consecutive, self._rollbacks
        found = self._chosen[kind](Fault(kind, step, reason, is_reproducible, updated, *counts))
        if found not in ("stop", "skip", "rollback"):
            raise UserError(
                f"train.on_{kind} is {shown(self.name(kind))}, which answers {shown(repr(found))} at step {step} but "
                f"must answer {one_of(found, ['stop', 'skip', 'rollback'])}."
            )
        return found

    def name(self, kind: Kind) -> str:
        return self._train.on_nan if kind == "nan" else self._train.on_spike

    def skip(self, kind: Kind) -> str:
        """Count a skipped step; return the limit that it exceeds, as a clause, or an empty string."""
        self._skips += 1
        self._consecutive += 1
        in_a_row, most = self._train.max_consecutive_skips, self._train.max_skipped_steps
        begins = f"train.on_{kind} is {self.name(kind)}, and train."
        if self._consecutive > in_a_row:
            return f"{begins}max_consecutive_skips allows {in_a_row} skipped steps in a row"
        return f"{begins}max_skipped_steps allows {most} skipped steps in a run" if self._skips > most else ""

    def roll_back(self, kind: Kind) -> str:
        """Count a rollback; return the limit that it exceeds, as `skip` does."""
        self._rollbacks += 1
        most, rule = self._train.max_rollbacks, f"train.on_{kind} is {self.name(kind)}, and train.max_rollbacks"
        return f"{rule} allows {most}" if self._rollbacks > most else ""


class BadSteps(Guard):
    """Guard that follows the fault policies when a step is bad."""

    def __init__(self, engine: Engine, loader: Loader, saving: SafeSaving, policy: AnomalyPolicy) -> None:
        self._engine, self._loader, self._saving, self._policy = engine, loader, saving, policy
        self.checks_state = engine.config.train.on_nan not in ("stop", "skip")  # the others may roll back

    def respond(self, bad: BadStep) -> Response:
        """Follow `train.on_spike`, or diagnose a loss or gradient norm that is not finite and follow `train.on_nan`.

        Raises:
            DivergenceError: the run must end.
            HardwareFault: the run must end, and a second run of the step was finite.
        """
        if bad.error is None:
            return self._follow("spike", bad.step, bad.refused)
        found = diagnose(self._engine, self._loader, bad.batch, bad.step - 1, bad.loss, bad.streams)
        reason = "; ".join([bad.error.what, *found.clauses()])
        if found.is_reproducible:
            return self._follow("nan", bad.step, reason, bad.error.advice)
        action = self._policy.action("nan", bad.step, reason, is_reproducible=False)
        if action == "stop":
            ended = f"Training diverged at step {bad.step}: {reason}; {self._saving.resume_hint()}."
            raise HardwareFault(ended, tuple(found.differing), bad.step - 1)
        return self._do(action, "nan", bad.step, reason)

    def check_state(self, step: int) -> Response | None:
        """Roll back if weights or optimizer state are not finite after `step`; otherwise leave it to the save."""
        if self._saving.store.is_finite():
            return None
        reason = "weights or optimizer state are not finite after it"
        if self._policy.action("nan", step, reason, updated=True) != "rollback":
            return None  # the save reports it
        return self._do("rollback", "nan", step, reason)

    def _follow(self, kind: Kind, step: int, reason: str, *advice: str) -> Response:
        return self._do(self._policy.action(kind, step, reason), kind, step, reason, *advice)

    def _do(self, action: Action, kind: Kind, step: int, reason: str, *advice: str) -> Response:
        """Skip or roll back, unless a limit is exceeded; `advice` are further clauses of the error."""
        begins = f"Training {'diverged' if kind == 'nan' else 'was stopped'} at step {step}: {reason}"
        if action == "stop":
            raise self._ended(begins, *advice)
        if limit := self._policy.skip(kind) if action == "skip" else self._policy.roll_back(kind):
            raise self._ended(begins, limit, *advice)
        if action == "skip":
            return Response(reason)
        path = self._saving.roll_back()
        if path is None:
            rule = f"train.on_{kind} is {self._policy.name(kind)}, and there is no good checkpoint to go back to"
            raise self._ended(begins, rule, *advice)
        facts = self._saving.store.load(path)
        size = read_by_step(self._engine.config)
        self._loader.consumed = ConsumedSamples(size, facts.step, facts.consumed_samples, facts.blend)
        self._policy.rolled_back(step, facts.step, reason, facts.anomalies)
        return Response(reason, facts.step)

    def _ended(self, *clauses: str) -> DivergenceError:
        return self._saving.set_aside_and_explain("; ".join(clauses).removesuffix("."))


class SpikeDetector:
    """Detector of loss and gradient-norm spikes, relative to the medians of the last steps that made an update.

    A step is a spike above `factor` times a median over `window` steps; until that many have been seen, or without a
    factor, none is. `recent` has loss and norm of these steps, the newest last.
    """

    def __init__(self, factor: float | None, window: int, recent: Iterable[tuple[float, float]] = ()) -> None:
        self.factor, self.window = factor, window
        self.recent: deque[tuple[float, float]] = deque(() if factor is None else recent, maxlen=window)

    def reason(self, loss: float, norm: float) -> str:
        """Return why a step is a spike, as a clause; empty if it is none."""
        if self.factor is None or len(self.recent) < self.window:
            return ""
        losses, norms = zip(*self.recent, strict=True)
        for name, value, known in (("loss", loss, losses), ("gradient norm", norm, norms)):
            usual = median(known)
            if value > self.factor * usual > 0:
                return (
                    f"the {name} is {value:g}, more than {self.factor:g} (train.spike_factor) times {usual:g}, its "
                    f"median over the last {self.window} steps"
                )
        return ""

    def add(self, loss: float, norm: float) -> None:
        if self.factor is not None:
            self.recent.append((loss, norm))


def _words(found: tuple[int, int]) -> str:
    first, last = found
    return f"step {first}" if first == last else f"steps {first} to {last}"
