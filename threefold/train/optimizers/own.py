"""Any `torch.optim.Optimizer` over the shards of a layout, named by its import path in `optimizer.name`.

It updates this rank's local shards of the master weights, so it must treat elements independently, as Adam and Lion do;
its state tensors are then sharded like the weight. A class that needs whole weights, for example to divide by a matrix
norm, sets `needs_whole_matrices = True`: it gets whole weights and whole gradients, every rank that holds a shard makes
the same update, and each keeps its shard of the result. For each weight that a layout shards, this costs an all-gather
of its gradient in each step, and, on each of those ranks, memory for the whole weight and its whole state. Of experts,
it gets those that a rank holds. An optimizer that needs whole weights without the attribute gives different weights in
another layout, which `threefold verify` detects.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.config.optimizer import OPTIMIZERS
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import one_of
from threefold.train.optim import Entry, TorchRule, UpdateRule

_OF_THE_SECTION = ("lr", "weight_decay")
"""Arguments that have settings of their own."""


def update_rule(config: OptimizerConfig) -> type[UpdateRule]:
    """Return a config's update rule; raise a `UserError` if `optimizer.name` cannot be imported or is no optimizer."""
    found = OPTIMIZERS.load(config.name)
    if isinstance(found, type) and issubclass(found, UpdateRule):
        return found
    if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.optim.Optimizer)):
        raise UserError(
            f"optimizer.name is {shown(config.name)}, which is {shown(repr(found))} but must be a subclass of "
            "torch.optim.Optimizer, or a function that makes one."
        )
    return OwnOptimizer


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise a `UserError`, before any process starts, unless a user's optimizer steps and its state can be sharded."""
    if update_rule(config) is OwnOptimizer:
        for shape in ((4, 6), (6,)):
            _trial(config, torch.zeros(shape))


class OwnOptimizer(TorchRule):
    """Optimizer given by `optimizer.name` and `optimizer.arguments`.

    It reads `lr`, which follows the schedule, and, if its constructor takes it, `weight_decay`, which does not apply to
    biases and norms. For each parameter it may keep tensors of the parameter's shape, tensors without dims, and
    numbers; with `needs_whole_matrices` also tensors of other shapes, which all ranks that hold the weight share.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        self._whole = needs_whole_matrices(config)
        super().__init__(entries, config, self._whole)
        self._given: dict[str, dict[str, _State]] = {}
        """State returned by `state`, by parameter; a checkpoint may fill it until the next step."""

    def make(self, groups: Sequence[tuple[list[Tensor], float]]) -> torch.optim.Optimizer:
        return _make(self.config, groups)

    def step(self, lr: float) -> None:
        self._given = {}  # no checkpoint has filled it
        super().step(lr)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        tensor = self._updated.of(entry)
        found = {} if self._torch is None else self._torch.state.get(tensor, {})
        values = {name: value for name, value in found.items() if value is not None}
        if values or entry.name not in self._given:
            if not values:  # those of a step, to be filled
                values = _trial(self.config, torch.zeros_like(tensor, requires_grad=False), entry.decays)
            self._given[entry.name] = given = {}
            for name, value in values.items():
                number = None if isinstance(value, Tensor) else type(value)
                whole = value.detach() if number is None else torch.tensor(value, dtype=torch.float64)
                given[name] = _State(self._updated.shard_of_state(entry, whole), whole.shape, number)
        return {name: state.tensor for name, state in self._given[entry.name].items()}

    def is_replicated(self, entry: Entry, state: str, value: Tensor) -> bool:
        if not self._whole:
            return value.dim() == 0
        return self._updated.is_replicated(entry, self._given[entry.name][state].shape)

    def restored(self) -> None:
        """Take over the state that a checkpoint has filled."""
        self._updated.gather_again()
        for entry in self.entries:
            if self._torch is not None and entry.name in self._given:
                # Numbers and shards of whole tensors were handed out as copies, so the filled values replace the state.
                self._torch.state[self._updated.of(entry)] = {
                    name: self._updated.whole_state(entry, tensor, shape) if number is None else number(tensor.item())
                    for name, (tensor, shape, number) in self._given[entry.name].items()
                }
        self._given = {}

    @classmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        shape = torch.Size((4, 6))
        return sum(
            isinstance(value, Tensor) and value.shape == shape for value in _trial(config, torch.zeros(shape)).values()
        )


class _State(NamedTuple):
    """One state of a parameter: this rank's stored tensor, and the shape and number type that the optimizer keeps."""

    tensor: Tensor
    shape: torch.Size
    number: type | None


def needs_whole_matrices(config: OptimizerConfig) -> bool:
    """Return whether a user's optimizer declares `needs_whole_matrices`."""
    return bool(getattr(OPTIMIZERS.load(config.name), "needs_whole_matrices", False))


def _make(config: OptimizerConfig, groups: Sequence[tuple[list[Tensor], float]]) -> torch.optim.Optimizer:
    make: Callable[..., Any] = OPTIMIZERS.load(config.name)
    arguments = dict(config.arguments or {})
    parameters = list(inspect.signature(make).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    takes = [parameter.name for parameter in parameters][1:]
    for name in arguments:
        if name in _OF_THE_SECTION:
            raise UserError(f"optimizer.arguments has {name}, a setting of its own; set optimizer.{name} instead.")
        if not takes_any and name not in takes:
            others = [each for each in takes if each not in _OF_THE_SECTION]
            rule = f"takes {one_of(name, others)}" if others else "takes none; leave it out"
            raise UserError(f"optimizer.arguments has {shown(name)} but {shown(config.name)} {rule}.")
    decays = takes_any or "weight_decay" in takes
    given = [{"params": params, **({"weight_decay": decay} if decays else {})} for params, decay in groups]
    try:
        made = make(given, lr=config.lr, **arguments)
    except Exception as error:
        raise UserError(f"{_called(config)} cannot be made: {_told(error)}.") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(
            f"{_called(config)} makes a {type(made).__name__} but must make a torch.optim.Optimizer; return one."
        )
    return made


@torch.enable_grad()
def _trial(config: OptimizerConfig, like: Tensor, decays: bool = True) -> dict[str, Any]:
    """Return a parameter's state after one trial step; raise a `UserError` if it fails or cannot be sharded."""
    parameter = like.detach().clone().requires_grad_()
    optimizer = _make(config, [([parameter], config.weight_decay if decays else 0.0)])
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise UserError(f"{_called(config)} cannot step: {_told(error)}.") from error
    found = {str(name): value for name, value in optimizer.state[parameter].items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, Tensor | int | float):
            raise UserError(
                f"{_called(config)} keeps a {type(value).__name__} as its state {shown(name)}, which no checkpoint can "
                "have; keep tensors and numbers."
            )
        whole = needs_whole_matrices(config)
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape and not whole:
            raise UserError(
                f"{_called(config)} keeps a state {shown(name)} of the shape {list(value.shape)} for a parameter of "
                f"{list(parameter.shape)}, so it does not treat elements independently; give its class "
                "needs_whole_matrices = True."
            )
    return found


def _called(config: OptimizerConfig) -> str:
    arguments = "".join(f", {name}={value!r}" for name, value in (config.arguments or {}).items())
    return f"optimizer.name is {shown(config.name)}, which with lr={config.lr:g}{shown(arguments)}"


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(".")
