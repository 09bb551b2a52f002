"""Norms of each layer every `log.layers` steps: gradients, updates, activations, and units that are dead."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from threefold.train.callbacks.base import Callback, RunContext
from threefold.train.callbacks.records import StepRecord
from threefold.train.model_view import ActivationWatch, squares

PREFIX: Final = "layers/"
_HIDDEN: Final = "mlp.down"
"""Module of a layer whose inputs are the hidden units of its feed-forward network, in all built-in families."""
_DEAD: Final = 1e-3
"""Fraction of the root mean square of a layer's hidden units below which all values of a dead unit are."""


class LayerNorms(Callback):
    """Log norms of each layer every `every` steps, the same numbers in every layout up to rounding.

    `layers/gradient/NAME` is the norm of a layer's gradient before clipping; `layers/update/NAME` that of the change of
    its weights, divided by their norm before; `layers/activation/NAME` the root mean square of its output over the
    global batch, which the last layer does not have; and `layers/dead/NAME` the fraction of the hidden units of its
    feed-forward network whose values for all tokens are below a thousandth of those units' root mean square. In such a
    step, a rank holds a second copy of its weights.
    """

    ranks = "all"

    @classmethod
    def for_run(cls, run: RunContext) -> "LayerNorms | None":
        return cls(run.config.log.layers, run.config.parallel.sequence_parallel) if run.config.log.layers else None

    def __init__(self, every: int, shares_sequence: bool = False) -> None:
        self.step_interval, self._shares_sequence = every, shares_sequence
        self._before: dict[str, Tensor] | None = None
        self._watches: list[ActivationWatch] = []

    def setup(self, run: RunContext) -> None:
        self._run, self._layers, mesh = run, run.model.layers, run.mesh
        self._sums = torch.zeros(len(self._layers), 2, dtype=torch.float64, device=mesh.device)
        self._hidden = torch.zeros_like(self._sums)
        self._largest: dict[int, Tensor] = {}
        self._counts_output = self._shares_sequence or mesh.tp.is_first
        self._widths = {name: run.model.shape(name)[1] for name, _ in run.model.named_parameters() if _is_hidden(name)}

    def before_step(self, step: int, batch: object) -> None:
        self._end()
        self._before = {name: each.detach().clone() for name, each in self._trained()}
        for place, layer in enumerate(self._layers[:-1]):
            self._watches.append(self._run.activations(layer, self._adding(place)))
        for place, layer in enumerate(self._layers):
            if f"{layer}.{_HIDDEN}" in self._run.model.modules:
                watch = self._run.activations(f"{layer}.{_HIDDEN}", self._adding_units(place), inputs=True)
                self._watches.append(watch)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._end()

    def after_step(self, record: StepRecord) -> None:
        if self._before is None:  # a step that was skipped on purpose
            return
        model, before = self._run.model, self._before
        weights = self._by_layer(model.norms(before))
        changes = self._by_layer(model.norms({name: each.detach() - before[name] for name, each in self._trained()}))
        found = {
            "gradient": self._by_layer(self._run.gradient_norms()),
            "update": {layer: change / weights[layer] for layer, change in changes.items() if weights[layer]},
            **self._activations(),
        }
        for kind, values in found.items():
            for layer in self._layers:
                if layer in values:
                    record.log(f"{PREFIX}{kind}/{layer}", values[layer])
        self._end()

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, each) for name, each in self._run.model.named_parameters() if each.requires_grad)

    def _by_layer(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Return the norm of each layer, from those of its parameters."""
        sums: dict[str, float] = {}
        for name, norm in norms.items():
            layer = max((each for each in self._layers if name.startswith(f"{each}.")), key=len, default="")
            if layer:
                sums[layer] = sums.get(layer, 0.0) + norm**2
        return {layer: total**0.5 for layer, total in sums.items()}

    def _activations(self) -> dict[str, dict[str, float]]:
        """Return the root mean squares of outputs, and the fractions of dead units; collective over the world."""
        mesh, count = self._run.mesh, len(self._layers)
        sums = torch.cat([self._sums, self._hidden])
        mesh.world.all_reduce_(sums)
        squared, numbers = sums.T.tolist()
        rms = [(total / number) ** 0.5 if number else None for total, number in zip(squared, numbers, strict=True)]
        dead = torch.zeros_like(self._sums)
        if self._largest:  # on all ranks of this stage
            places = sorted(self._largest)
            largest = torch.cat([self._largest[place] for place in places])
            mesh.replicas.all_reduce_max_(largest)
            parts = largest.split([len(self._largest[place]) for place in places])
            for place, units in zip(places, parts, strict=True):
                width = self._widths.get(f"{self._layers[place]}.{_HIDDEN}.weight", len(units))
                if mesh.replicas.is_first and (len(units) < width or mesh.tp.is_first):
                    least = _DEAD * (rms[count + place] or 0.0)
                    dead[place] = torch.stack([(units <= least).sum().double(), dead.new_tensor(len(units))])
        mesh.world.all_reduce_(dead)
        shares = zip(self._layers, dead.tolist(), strict=True)
        return {
            "activation": {layer: each for layer, each in zip(self._layers, rms, strict=False) if each is not None},
            "dead": {layer: lost / units for layer, (lost, units) in shares if units},
        }

    def _adding(self, place: int) -> Callable[[str, Tensor, int], None]:
        def add(name: str, output: Tensor, step: int) -> None:
            if self._counts_output and output.is_floating_point():
                self._sums[place, 0] += squares(output)
                self._sums[place, 1] += output.numel()

        return add

    def _adding_units(self, place: int) -> Callable[[str, Tensor, int], None]:
        def add(name: str, units: Tensor, step: int) -> None:
            if units.shape[-1] < self._widths.get(f"{name}.weight", 0) or self._run.mesh.tp.is_first:
                self._hidden[place, 0] += squares(units)
                self._hidden[place, 1] += units.numel()
            largest = units.abs().flatten(0, -2).amax(0).double()
            held = self._largest.get(place)
            self._largest[place] = largest if held is None else torch.maximum(held, largest)

        return add

    def _end(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches, self._before = [], None
        self._largest.clear()
        self._sums.zero_()
        self._hidden.zero_()


def _is_hidden(name: str) -> bool:
    return name.endswith(f".{_HIDDEN}.weight")
