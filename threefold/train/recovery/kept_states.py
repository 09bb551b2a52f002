"""The newest states of a rank in memory, from which a restart goes on where they are newer than any checkpoint."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.checkpoint.folder import newest
from threefold.checkpoint.manifest import AnomalyFacts
from threefold.checkpoint.warm_start import find_warm_start
from threefold.checksums import checksum_of
from threefold.comm.mesh import Axis, Mesh
from threefold.config import Config
from threefold.data.samples import ConsumedSamples
from threefold.train.callbacks.base import Callback
from threefold.train.callbacks.console import say
from threefold.train.callbacks.line_file import reason_of
from threefold.train.recovery.memory_copy import MemoryCopy
from threefold.train.state import Checkpoints, checkpoint_tensors, engine_tensors


class KeptStates(Callback):
    """Keeps the state of this rank in memory before every n-th step, and finds the one to go on from.

    The state before step s + 1 is that after s updates and all that followed them: the evaluation and the checkpoint
    that were due. A rank makes step s + 1 only together with all others, so no rank is more than one state ahead of
    another, and of two copies that are written in turn one belongs to a step that every rank has.

    Args:
        files: in memory, of this rank; none where states are not kept.
        config: resolved; a state counts only in the same layout.
        mesh: this rank's.

    Attributes:
        anomalies: what the run had done about bad steps, once a state is restored.
    """

    ranks: ClassVar[Literal["first", "all"]] = "all"

    def __init__(self, files: Sequence[Path], config: Config, mesh: Mesh) -> None:
        self._config, self._mesh, self._every = config, mesh, config.checkpoint.memory_every
        self._layout = _key(config)
        self._checkpoints: Checkpoints | None = None
        self._copies: list[MemoryCopy] = []
        self.anomalies: AnomalyFacts | None = None
        with suppress(OSError):  # gone with the launcher, which ends this rank too
            for file in files:
                self._copies.append(MemoryCopy(file))

    def newest(self, world: Axis) -> int | None:
        """The newest step whose state every rank has whole. Collective over the world where states are kept."""
        if not self._copies:
            return None
        mine = {copy.step for copy in self._copies if copy.is_whole() and copy.facts()["layout"] == self._layout}
        common = set.intersection(*map(set, world.gather_objects(sorted(step for step in mine if step is not None))))
        return max(common, default=None)

    def restore(self, step: int, checkpoints: Checkpoints) -> None:
        """Fill the engine from the state after `step` updates, which `newest` found whole."""
        engine = checkpoints.engine
        streams, shape = engine.streams, engine.mesh.layout.shape
        copy = next(copy for copy in self._copies if copy.step == step)
        tensors = engine_tensors(engine)
        drawn, generators = streams.stored(shape), engine.generators.places(shape)
        filled = copy.read(_locals(tensors | drawn | generators))
        engine.optimizer.restored()
        if any(name in drawn for name in filled):
            streams.load_stored(drawn, shape)
        engine.generators.load_stored({name: state for name, state in generators.items() if name in filled}, shape)
        facts, scale = copy.facts(), engine.loss_scale
        if scale is not None:
            scale.value, scale.good_steps = facts["loss_scale"], facts["good_steps"]
        checkpoints.passed = frozenset(map(Path, facts["passed"]))
        batch = checkpoints.config.train.global_batch_size
        checkpoints.consumed = ConsumedSamples(batch, step, facts["consumed_samples"])
        self.anomalies = _anomalies(facts["anomalies"])
        if engine.mesh.world.is_first:
            saved = newest(checkpoints.run_dir) or getattr(find_warm_start(checkpoints.config), "checkpoint", None)
            if saved is not None:
                checkpoints.carry(saved)

    def keep_of(self, checkpoints: Checkpoints) -> None:
        """Keep the states of this engine from now on."""
        self._checkpoints = checkpoints

    def before_fit(self, start: int) -> None:
        self._discard_after(start)

    def before_step(self, step: int, batch: Any) -> None:
        done = step - 1
        if not self._copies or not done or done % self._every:
            return
        self._discard_after(done)
        if any(copy.step == done for copy in self._copies):  # the one that the run went on from
            return
        try:
            self._keep(done)
        except OSError as error:
            for copy in self._copies:
                copy.discard()
            self._copies = []
            say(f"Warning: no more states are kept in memory ({reason_of(error)}); restarts use checkpoints.")

    def close(self) -> None:
        for copy in self._copies:
            copy.close()
        self._copies = []

    def _discard_after(self, step: int) -> None:
        """Drop the states of later steps, which a run that has gone back does not make in the same way."""
        for copy in self._copies:
            if copy.step is not None and copy.step > step:
                copy.discard()

    def _keep(self, done: int) -> None:
        assert self._checkpoints is not None
        engine, scale = self._checkpoints.engine, self._checkpoints.engine.loss_scale
        tensors = checkpoint_tensors(engine)
        facts = {
            "layout": self._layout,
            "loss_scale": scale.value if scale else None,
            "good_steps": scale.good_steps if scale else 0,
            "consumed_samples": self._checkpoints.consumed.before(done),
            "anomalies": asdict(found) if (found := self._checkpoints.anomalies()) else None,
            "passed": sorted(map(str, self._checkpoints.passed)),
        }
        oldest = min(self._copies, key=lambda copy: -1 if copy.step is None else copy.step)
        oldest.write(done, _locals(tensors), facts)


def _locals(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of each, sharing its memory."""
    with torch.no_grad():
        return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def _anomalies(stored: dict[str, Any] | None) -> AnomalyFacts | None:
    """Facts that JSON has had, which knows lists alone."""
    if stored is None:
        return None
    pairs = {name: tuple(map(tuple, stored[name])) for name in ("skipped", "recent")}
    return AnomalyFacts(**{**stored, **pairs})


def _key(config: Config) -> str:
    """What the states of two attempts have to have in common besides their tensors."""
    sections = config.sections()
    settings = [sections[name] for name in ("parallel", "model", "precision")]
    return checksum_of(json.dumps(settings, default=str).encode())
