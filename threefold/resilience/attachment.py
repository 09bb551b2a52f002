"""Responses to faults in a run: policies for bad steps, the watch for corruption, and states in memory."""

from collections.abc import Sequence

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.data.loader import Loader
from threefold.resilience.anomalies import AnomalyPolicy, BadSteps
from threefold.resilience.corruption import CorruptionWatch, GradientCheck
from threefold.resilience.states_in_memory import StateKeeper, StatesInMemory
from threefold.train.attachment import Attachment
from threefold.train.callbacks.base import Callback
from threefold.train.saving import SafeSaving
from threefold.train.state import KeptStates, StartingPoint
from threefold.train.step import Engine


class FaultResponse(Attachment):
    """Policies for bad steps, the watch for corruption, and copies of the state in memory."""

    def __init__(self, engine: Engine, loader: Loader, start: StartingPoint, kept: KeptStates | None) -> None:
        super().__init__(engine, loader, start, kept)
        self._policy = AnomalyPolicy(engine.config, start.anomalies)
        self._watch: CorruptionWatch | None = None

    def record(self) -> AnomalyFacts | None:
        return self._policy.facts()

    def is_proved(self, step: int) -> bool:
        return self._watch is None or self._watch.is_proved(step)

    def callbacks(self, saving: SafeSaving) -> Sequence[Callback]:
        engine, train, found = self.engine, self.engine.config.train, list[Callback]()
        if isinstance(self.kept, StatesInMemory) and self.kept.states:
            found.append(StateKeeper(self.kept, saving.store))
        if train.watch_every:
            gradients = GradientCheck(engine, self.loader) if train.watch == "gradients" else None
            self._watch = CorruptionWatch(engine, train.watch_every, saving.store.newest, gradients)
            found.append(self._watch)
        return [*found, self._policy, BadSteps(engine, self.loader, saving, self._policy)]
