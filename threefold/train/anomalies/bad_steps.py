"""What a training loop does about a bad step: it says where that began, and stops, skips the step or rolls back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from threefold.data.loader import Loader
from threefold.data.samples import ConsumedSamples
from threefold.errors import HardwareFault
from threefold.train.anomalies.diagnosis import diagnose
from threefold.train.anomalies.policy import AnomalyPolicy, Kind
from threefold.train.divergence import CheckpointStore, DivergenceError, SafeSaving
from threefold.train.engine import Engine, NonFiniteStep


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
