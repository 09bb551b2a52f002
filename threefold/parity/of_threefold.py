"""Recording of a run of `threefold train` or `Trainer`, which `threefold parity` compares with any other code."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from threefold.config.model import CUSTOM
from threefold.data.loader import Batch, Loader
from threefold.models.custom_batch import map_tensors
from threefold.models.layers.decoder import PositionEmbedding
from threefold.parallel.parameter import Weight, is_split, offset, slice_of
from threefold.train.callbacks.base import Guard
from threefold.train.callbacks.records import StepRecord
from threefold.train.step import Engine
from threefold_parity.adapters import Adapter, Placed, clean_name
from threefold_parity.placement import Piece, Placement
from threefold_parity.recorder import AFTER, Recorder


class ThreefoldAdapter(Adapter):
    """Adapter for a run's engine, in every layout.

    Weights are the masters, which are updated. Outputs are recorded of modules whose output is an activation [samples,
    positions, features] that this rank holds whole or whose part is known. When the recorder has recorded all its
    steps, `ended` becomes true, so that the run ends.
    """

    name = "threefold"
    clips_before_update = False
    offers_wide = True

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self._mesh = engine, engine.mesh
        self._weights = {weight.name: weight for weight in engine.model.trained}
        rule, entries = engine.optimizer.rule, engine.optimizer.entries
        self._states = {entry.name: rule.state(entry) for entry in entries}
        self._settings = {entry.name: (rule.lr_scale(entry), rule.weight_decay(entry)) for entry in entries}
        self._length = 0 if engine.config.model.architecture == CUSTOM else engine.config.data.sequence_length
        self._cut = engine.parallelism.context.cut
        self.before_update: Callable[[], None] = _nothing
        self._after: Callable[[], None] = _nothing
        self._lr = 0.0
        self.ended = False

    def widen(self) -> None:
        """Do nothing: `threefold train` and `Trainer` have made the engine in fp64."""

    def after_update(self, lr: float) -> None:
        """Record an update that was made with the learning rate `lr`, and end the step."""
        self._lr = lr
        self._after()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self._weights.items():
            yield name, cast(nn.Parameter, weight.parameter)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        for stage in self.models:
            for name, module in stage.named_modules():
                # Embedded positions are the same for all samples.
                called = type(module).forward is not nn.Module.forward and not isinstance(module, PositionEmbedding)
                # A wrapper's child has its name.
                inside = {clean_name(f"{name}.{child}") for child, _ in module.named_children()}
                if name and called and clean_name(name) not in inside:
                    yield clean_name(name), module

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of a user's own model, which every rank holds whole."""
        return iter(()) if self._length else super().buffers()

    def weight(self, name: str, parameter: nn.Parameter) -> Placed:
        return [self._placed(self._weights[name], self._weights[name].master)]

    def gradient(self, name: str, parameter: nn.Parameter) -> Placed:
        weight = self._weights[name]
        return [self._placed(weight, self._engine.gradients[weight.leaf])]

    def states(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Placed]]:
        weight = self._weights[name]
        for key, value in self._states[name].items():
            if value.shape == weight.master.shape and value.is_floating_point() and value.dim():
                yield key, [self._placed(weight, value)]

    def counters(self, name: str, parameter: nn.Parameter) -> Mapping[str, float]:
        scale, decay = self._settings[name]
        found = {"lr": self._lr * scale, "weight_decay": decay}
        step = self._states[name].get("step")
        return found if step is None else {**found, "updates": float(step)}

    def load(self, name: str, parameter: nn.Parameter, read: Callable[[str], Tensor]) -> None:
        weight = self._weights[name]
        with torch.no_grad():
            weight.master.copy_(slice_of(weight.parameter, read(name)))

    def loaded(self) -> None:
        self._engine.optimizer.restored()

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
        self.before_update, self._after = before, after
        return [self]

    def remove(self) -> None:
        self.before_update = self._after = _nothing

    def leave(self) -> None:
        self.ended = True

    def activation(self, kind: str, name: str, tensor: Tensor) -> tuple[Tensor, Placement]:
        if not self._length and self._mesh.tp.size == self._mesh.cp.size == 1:
            return self.placement("activation", name, tensor)
        features, spans = self._features_of(name, tensor), self._positions_of(tensor)
        if features is None or spans is None:
            return tensor, Placement(tuple(tensor.shape), ())
        (start, width), (samples, positions, held) = features, tensor.shape
        pieces, at = [], 0
        for first, length in spans:
            pieces.append(Piece((0, at, 0), (0, first, start), (samples, length, held)))
            at += length
        over_tp = width != held or (self._cut.tp > 1 and positions * self._cut.shares == self._length)
        copy = 0 if over_tp else self._mesh.tp.index
        return tensor, Placement((samples, self._length or positions, width), tuple(pieces), copy)

    # ---- places -----------------------------------------------------------------------------------------------------

    def _placed(self, weight: Weight, value: Tensor) -> tuple[Tensor, Placement]:
        parameter, tied, gradients = weight.parameter, self._engine.model.tied, self._engine.gradients
        start = offset(parameter)
        first = gradients.is_in_norm(weight.leaf) and tied.is_primary(weight.name)
        copy = 0 if first and (is_split(parameter) or self._mesh.tp.is_first) else 1 + self._mesh.rank
        size = tuple(value.shape)
        piece = Piece((0,) * len(size), start, size)
        return value.detach(), Placement(tuple(parameter.shape), (piece,) if value.numel() else (), copy)

    def _features_of(self, name: str, tensor: Tensor) -> tuple[int, int] | None:
        """Return the first feature of an activation that this rank holds, and how many the whole one has."""
        if tensor.dim() != 3:
            return None
        held = tensor.shape[2]
        weight = self._weights.get(self._engine.plan.whole_name(f"{name}.weight"))
        if weight is not None and is_split(weight.parameter):
            rows, columns = weight.parameter.shape[0], weight.parameter.shape[-1]
            if held == weight.leaf.shape[0] != rows:  # of a column-parallel layer
                return offset(weight.parameter)[0], rows
            return (0, held) if held in (rows, columns) else None  # of a row-parallel one, or an embedding
        if self._mesh.tp.size == 1 or weight is not None:
            return 0, held
        hidden, tp = self._engine.config.model.hidden_size, self._mesh.tp
        if self._length and held * tp.size == hidden:  # the heads of attention
            return tp.index * held, hidden
        return (0, held) if held == hidden else None

    def _positions_of(self, tensor: Tensor) -> list[tuple[int, int]] | None:
        """Return the positions of an activation that this rank holds, as starts and lengths."""
        if tensor.dim() != 3:
            return None
        held, cut = tensor.shape[1], self._cut
        if held == self._length or cut.shares == 1:
            return [(0, held)]
        if held * cut.cp == self._length:
            cut = cut.across_context
        elif held * cut.shares != self._length:
            return None
        numbers = cut.indices(held, torch.device("cpu")).tolist()
        spans: list[tuple[int, int]] = []
        for number in numbers:
            if spans and number == sum(spans[-1]):
                spans[-1] = spans[-1][0], spans[-1][1] + 1
            else:
                spans.append((number, 1))
        return spans


class ParityRecording(Guard):
    """Guard that records the first steps of a run, in the folder that `threefold parity run` gives.

    The run has made this number of `updates` before.
    """

    def __init__(self, engine: Engine, loader: Loader, updates: int) -> None:
        self._adapter = ThreefoldAdapter(engine)
        layout = engine.mesh.layout
        axes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
        epoch = None
        if loader.consumed.has_one_size:
            steps, rest = divmod(len(loader.train), engine.config.train.global_batch_size)
            # A batch goes on with the samples of the next epoch, which then begins within a step.
            is_first = not updates and not int(os.environ.get(AFTER) or 0)
            epoch = steps + bool(rest) if not rest or is_first else None
        self._recorder = Recorder(
            engine.model.stages, None, self._adapter, axes=axes, epoch_steps=epoch, updates=updates
        )

    def before_step(self, step: int, batch: Any) -> None:
        """Pass the samples of this rank's replica to the recorder."""
        if isinstance(batch, Batch):
            self._recorder.batch(batch.tokens, batch.labels)
            return
        tensors: list[Tensor] = []
        map_tensors(batch, tensors.append)
        if tensors:
            self._recorder.batch(tensors[0])

    def before_update(self, step: int) -> None:
        """Record the gradients, which are complete and not clipped."""
        self._recorder.after_backward()
        self._adapter.before_update()

    def after_step(self, record: StepRecord) -> None:
        if not record.is_read:
            return
        self._recorder.scalar("loss", record.loss)
        self._recorder.scalar("gradient norm", record.grad_norm)
        self._adapter.after_update(record.lr)
        if self._adapter.ended:
            self.stop("the steps of threefold parity are recorded")

    def close(self) -> None:
        self._recorder.close()


def _nothing() -> None:
    pass
