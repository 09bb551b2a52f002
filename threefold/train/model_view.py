"""View of a run's model for callbacks: this rank's parameters, global norms, and the activations of training passes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from threefold.errors import UserError
from threefold.files import describe_error, shown
from threefold.models.sharding import matches
from threefold.models.source import skeleton
from threefold.plugins import one_of
from threefold.torch_private.runtime import backward_pass, outside_function_mode
from threefold.train.gradient_update import GradientUpdate

Watcher = Callable[[str, Tensor, int], object]
"""Function that is called with the name of a module, its activation and the step."""


class ActivationWatch:
    """Watch of the activations of some modules, from `RunContext.activations`, until `remove`."""

    def __init__(self, pattern: str, watcher: Watcher, of_inputs: bool, remove: Callable[["ActivationWatch"], None]):
        self.pattern, self.watcher, self.of_inputs, self._remove = pattern, watcher, of_inputs, remove

    def remove(self) -> None:
        """Stop calling the function; without effect the second time."""
        self._remove(self)


class ActivationWatches:
    """Functions that get activations in the forward passes of training steps; modules have hooks in these alone."""

    def __init__(self, stages: Sequence[nn.Module], make_model: Callable[[], nn.Module], rank: int) -> None:
        self._stages, self._make_model, self._rank = stages, make_model, rank
        self._watches: list[ActivationWatch] = []
        self._error: UserError | None = None

    def add(self, pattern: str, watcher: Watcher, of_inputs: bool) -> ActivationWatch:
        """Begin to call a function; raise a `UserError` if no module of the whole model matches."""
        if not any(matches(name, pattern) for name in self.names):
            raise UserError(
                f"run.activations has the pattern {shown(pattern)}, which no module of the model matches; the nearest "
                f"name is {one_of(pattern, list(self.names)).rpartition(' ')[2]}."
            )
        watch = ActivationWatch(pattern, watcher, of_inputs, self._remove)
        self._watches.append(watch)
        return watch

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all modules of the whole model."""
        return tuple(name for name, _ in skeleton(self._make_model, 0).named_modules() if name)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Call the functions with the activations of the passes in the block, those of `step`, from 1."""
        if not self._watches:
            yield
            return
        handles = [handle for watch in self._watches for handle in self._hooks(watch, step)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _remove(self, watch: ActivationWatch) -> None:
        self._watches = [each for each in self._watches if each is not watch]

    def _hooks(self, watch: ActivationWatch, step: int) -> Iterator[RemovableHandle]:
        for stage in self._stages:
            for name, module in stage.named_modules():
                if not name or not matches(name, watch.pattern):
                    continue
                call = partial(self._call, watch, name, step)
                if watch.of_inputs:
                    yield module.register_forward_pre_hook(
                        lambda _, given, call=call: call(given[0] if given else None)
                    )
                else:
                    yield module.register_forward_hook(lambda _, given, output, call=call: call(output))

    def _call(self, watch: ActivationWatch, name: str, step: int, value: Any) -> None:
        # A pass inside a backward pass is a recomputation.
        if not isinstance(value, Tensor) or backward_pass() != -1 or self._error is not None:
            return
        try:
            with torch.no_grad(), outside_function_mode():
                watch.watcher(name, value.detach(), step)
        except UserError as error:
            self._error = error
        except Exception as error:  # raised after the passes: torch's pipeline would wrap it
            what = describe_error(error).removesuffix(":")
            self._error = UserError(
                f"The function given to run.activations failed at {name} in step {step:,} on rank {self._rank} with "
                f"{what}."
            )
            self._error.__cause__ = error


class ModelView:
    """Model of a run as a callback sees it: this rank's part, under the names of the whole model.

    Args:
        update: gradients and weights of the engine.
        names: names in the whole model's `state_dict()`, in its order.
        layers: names of the whole model's layers, in order.
        is_compiled: whether layers are compiled, so that no hook can be called in them.
        is_alone: whether the callback is on the first of several ranks alone, so that it may call no collective.

    Attributes:
        layers: names of the whole model's layers, in order.
    """

    def __init__(
        self,
        update: GradientUpdate,
        watches: ActivationWatches,
        names: tuple[str, ...],
        layers: tuple[str, ...],
        is_compiled: bool = False,
        is_alone: bool = False,
    ) -> None:
        self._update, self._watches, self._names, self.layers = update, watches, names, layers
        self._is_compiled, self._is_alone = is_compiled, is_alone

    def on_ranks(self, ranks: str) -> "ModelView":
        """Return the view of a callback with these `ranks`."""
        is_alone = ranks == "first" and self._update.mesh.layout.world_size > 1
        return ModelView(self._update, self._watches, self._names, self.layers, self._is_compiled, is_alone)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules of the whole model."""
        return self._watches.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole parameter, of which this rank has a shard."""
        return next(tuple(weight.parameter.shape) for weight in self._update.weights if weight.name == name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards of the parameters with their names in the whole model.

        They are the tensors that the optimizer updates, fp32 unless the run's weights are wider; only the
        layers of this rank's pipeline stages are among them, each cut as tensor, expert and ZeRO sharding say, and some
        may be empty. Frozen parameters have `requires_grad` False. Read them, and leave their values alone.
        """
        return (
            (weight.name, weight.master.detach().requires_grad_(weight.is_trained)) for weight in self._update.weights
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's shards of the last step's gradients by name, summed over all samples of the global batch.

        After the step, they are clipped. Trained parameters of this rank alone.
        """
        update = self._update
        update.require_gradients()
        return {weight.name: update.gradients[weight.leaf].detach() for weight in update.trained}

    def norms(self, shards: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the Euclidean norms of whole tensors, given this rank's shards by the names of trained parameters.

        The names are those of all ranks' shards, in the order of the whole model; the norms are equal on all ranks, and
        the same in every layout up to rounding. One collective over the world: call it on all ranks alike.
        """
        update, mesh = self._update, self._update.mesh
        self._require_all()
        known = {weight.name for weight in update.trained}
        if wrong := next((name for name in shards if name not in known), None):
            raise UserError(
                f"run.model.norms has {shown(wrong)}, which is not a trained parameter of this rank; leave it out."
            )
        place = {name: number for number, name in enumerate(self._names)}
        sums = torch.zeros(2, len(place), dtype=torch.float64, device=mesh.device)
        for weight in update.trained:
            if weight.name in shards:
                sums[1, place[weight.name]] = 1.0
        for weight in update.counted:
            if weight.name in shards:
                sums[0, place[weight.name]] = squares(shards[weight.name])
        mesh.world.all_reduce_(sums)
        (summed, held), found = sums.tolist(), dict[str, float]()
        for name, number in place.items():
            if held[number]:
                found[name] = summed[number] ** 0.5
        return found

    def gradient_norms(self) -> dict[str, float]:
        """Return the norms of the last step's gradients, before clipping; see `RunContext.gradient_norms`."""
        self._require_all()
        factor = self._update.clipped
        return {name: norm / factor for name, norm in self.norms(self.gradients()).items()}

    def _require_all(self) -> None:
        if self._is_alone:
            raise UserError(
                "Norms of the model's tensors are asked for by a callback of the first rank alone, but all ranks must "
                'ask together; write ranks = "all" in the class of the callback.'
            )

    def activations(self, pattern: str, watcher: Watcher, of_inputs: bool = False) -> ActivationWatch:
        """Call a function with activations; see `RunContext.activations`."""
        if self._is_compiled:
            raise UserError(
                f"run.activations has the pattern {shown(pattern)} but train.compile is true, and compiled layers call "
                "no hooks; use train.compile: false."
            )
        return self._watches.add(pattern, watcher, of_inputs)


def squares(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's squares in fp64, of rows that are added in the dtype itself, or in fp32."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide).square().sum(-1).double().sum() if tensor.dim() else tensor.double().square()
