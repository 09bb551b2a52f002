"""SGD, Lion, Muon, any `torch.optim.Optimizer` by path, and several optimizers at once; `optim.py` has AdamW and Adam.

A user's optimizer updates this rank's local shards of the master weights, so it must treat elements independently, as
Adam and Lion do; its state tensors are then sharded like the weight. A class that needs whole weights, for example to
divide by a matrix norm, sets `needs_whole_matrices = True` and gets whole weights and gradients (`UpdatedWeights`); for
experts, of those that a rank holds. An optimizer that needs whole weights but lacks the attribute gives different
weights in another layout, which `threefold verify` detects.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.config.optimizer import OPTIMIZERS
from threefold.errors import UserError
from threefold.files import describe_error, shown
from threefold.models.groups import group_of
from threefold.models.widths import rate_factor
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.plugins import one_of
from threefold.train.optim import AdamW, Entry, UpdateRule


class UpdatedWeights:
    """Tensors that a `torch.optim.Optimizer` updates: masters, or whole weights if it needs them and they are sharded.

    Every rank that holds a shard of a gathered weight makes the same update of the whole, and keeps its shard of the
    result. This costs an all-gather of the gradient in each step, and, on each of these ranks, memory for the whole
    weight and its whole state. All methods are collective over the axes that shard the weights, in the same order on
    all ranks.
    """

    def __init__(self, entries: Sequence[Entry], gathers: bool) -> None:
        self._entries = list(entries)
        self._tensors: dict[str, Tensor] = {}
        for entry in self._entries:
            if not gathers or entry.whole.is_whole:
                self._tensors[entry.name] = entry.master
            else:
                self._tensors[entry.name] = entry.whole.gather(entry.master.detach()).clone().requires_grad_()

    def of(self, entry: Entry) -> Tensor:
        return self._tensors[entry.name]

    def is_gathered(self, entry: Entry) -> bool:
        """Return whether the updated tensor is a whole weight that the layout shards."""
        return self.of(entry) is not entry.master

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step with the complete gradients, and update the masters from the whole weights."""
        for entry in self._entries:
            gradient = entry.gradient
            self.of(entry).grad = entry.whole.gather(gradient) if self.is_gathered(entry) else gradient
        optimizer.step()
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).grad = None
                entry.master.copy_(entry.whole.shard(self.of(entry), entry.master))

    @torch.no_grad()
    def gather_again(self) -> None:
        """Update the whole weights from the masters, after these were changed elsewhere."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).detach().copy_(entry.whole.gather(entry.master.detach()))

    def is_replicated(self, entry: Entry, shape: torch.Size) -> bool:
        """Return whether a state of this shape is equal on all ranks that hold the weight, not sharded like it."""
        return shape != self.of(entry).shape

    def shard_of_state(self, entry: Entry, value: Tensor) -> Tensor:
        """Return this rank's shard of an optimizer state; all of it if it is replicated."""
        if not self.is_gathered(entry) or self.is_replicated(entry, value.shape):
            return value
        return entry.whole.shard(value, entry.master).contiguous()

    def whole_state(self, entry: Entry, part: Tensor, shape: torch.Size) -> Tensor:
        """Return an optimizer state of this shape from the shards of all ranks."""
        if not self.is_gathered(entry) or self.is_replicated(entry, shape):
            return part
        return entry.whole.gather(part).clone()


class TorchRule(UpdateRule):
    """Base class of rules that a `torch.optim.Optimizer` makes, over local shards or, with `gathers`, whole weights."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig, gathers: bool = False) -> None:
        super().__init__(entries, config)
        self._updated = UpdatedWeights(self.entries, gathers)
        decayed = [self._updated.of(entry) for entry in self.entries if entry.decays]
        others = [self._updated.of(entry) for entry in self.entries if not entry.decays]
        groups = [(params, decay) for params, decay in ((decayed, config.weight_decay), (others, 0.0)) if params]
        self._torch = self.make(groups) if groups else None  # a rank may hold only frozen weights

    @abstractmethod
    def make(self, groups: Sequence[tuple[list[Tensor], float]]) -> torch.optim.Optimizer:
        """Make torch's optimizer for groups of tensors, each with its weight decay."""

    def step(self, lr: float) -> None:
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._updated.step(self._torch)


class SGD(TorchRule):
    """`torch.optim.SGD`: reads `momentum` and `nesterov`; keeps `momentum_buffer` unless the momentum is 0."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        if self._torch is not None and config.momentum:
            for entry in self.entries:  # now and not in the first step, so that a checkpoint always finds the state
                self._torch.state[entry.master] = {"momentum_buffer": torch.zeros_like(entry.master)}

    def make(self, groups: Sequence[tuple[list[Tensor], float]]) -> torch.optim.Optimizer:
        config = self.config
        given = [{"params": params, "weight_decay": decay} for params, decay in groups]
        # With momentum, the fused kernel computes a tensor's last elements with other instructions, to other bits.
        fused = not config.momentum or all(entry.arithmetic.fuses_updates for entry in self.entries)
        how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
        return torch.optim.SGD(given, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **how)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return self._torch.state.get(entry.master, {}) if self._torch is not None else {}


class Lion(UpdateRule):
    """Lion (Chen et al., arXiv 2302.06675), with decoupled weight decay: reads `betas`; keeps `exp_avg`.

    The sign turns a gradient that is only rounding noise (such as a key bias's) into a full step, so such a weight
    depends on the layout and on the machine.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        self._averages = {entry.name: torch.zeros_like(entry.master) for entry in self.entries}

    def step(self, lr: float) -> None:
        in_update, kept = self.config.betas
        for entry in self.entries:
            gradient, average = entry.gradient, self._averages[entry.name]
            update = average.lerp(gradient, 1 - in_update).sign_()
            entry.master.mul_(1 - lr * self.weight_decay(entry)).sub_(update, alpha=lr)
            average.lerp_(gradient, 1 - kept)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return {"exp_avg": self._averages[entry.name]}


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, steep at 0; singular values end up between about 0.7 and 1.2."""
EPS = 1e-7  # smallest norm that a matrix is divided by


class Muon(UpdateRule):
    """Muon: orthogonalized momentum (Jordan et al., https://kellerjordan.github.io/posts/muon) for hidden matrices.

    It reads `momentum`, `nesterov`, `newton_schulz_steps` and `lr_scaling`, and keeps `momentum_buffer`; the defaults
    are those of `torch.optim.Muon`, except `lr_scaling`. Embeddings, the head, norms and biases are updated by `AdamW`,
    with its settings and its state.

    The matrix is the whole weight as the unsplit model stores it (queries, keys and values together, for example; each
    expert's own for experts), so the update does not depend on the layout. If tensor parallelism or ZeRO shards a
    matrix, its momentum-updated gradient is all-gathered and orthogonalized on every rank that holds a shard, and each
    rank keeps its shard of the result. Cost per step and weight:

    - traffic: one all-gather for each axis that shards its matrix, of the weight's size in the dtype of the update.
      Pipeline stages, expert parallelism and replicas without ZeRO shard no matrix and send nothing;
    - memory: the whole weight, one weight at a time, and up to four times as much within the iteration; for experts,
      all experts of the rank;
    - arithmetic: at most 4 · steps · m · n · min(m, n) multiply-adds for an m × n matrix, on each rank that gathers it.

    The iteration runs in fp32 (fp64 in an fp64 run), not in bf16 as in `torch.optim.Muon`: rounded to bf16, the
    products of two layouts would differ in the third digit.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        self._momentum = {entry.name: torch.zeros_like(entry.master) for entry in self.entries if entry.is_hidden}
        self._others = AdamW([entry for entry in self.entries if not entry.is_hidden], config)

    def step(self, lr: float) -> None:
        config = self.config
        for entry in (each for each in self.entries if each.is_hidden):
            matrix, gradient, momentum = entry.whole, entry.gradient, self._momentum[entry.name]
            momentum.lerp_(gradient, 1 - config.momentum)
            update = gradient.lerp(momentum, config.momentum) if config.nesterov else momentum
            whole = newton_schulz(matrix.gather(update), config.newton_schulz_steps, entry.arithmetic)
            entry.master.mul_(1 - lr * self.weight_decay(entry))
            rows, columns = entry.parameter.shape[-2:]
            if config.lr_scaling == "original":  # as in Keller Jordan's implementation
                scale = max(1.0, rows / columns) ** 0.5
            else:  # match_rms_adamw: updates about as large as AdamW's (Liu et al., arXiv 2502.16982)
                scale = 0.2 * max(rows, columns) ** 0.5
            entry.master.add_(matrix.shard(whole, entry.master), alpha=-lr * scale)
        if self._others.entries:
            self._others.step(lr)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return {"momentum_buffer": self._momentum[entry.name]} if entry.is_hidden else self._others.state(entry)


def newton_schulz(matrices: Tensor, steps: int, arithmetic: LayerArithmetic = PLAIN) -> Tensor:
    """Move the singular values of matrices [..., m, n] near 1 by Newton–Schulz iterations, at least in fp32."""
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    matmul = arithmetic.matmul
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / arithmetic.matrix_norms(x).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = matmul(x, x.mT)
        x = a * x + matmul(b * gram + matmul(c * gram, gram), x)
    return x if wide else x.mT


class GroupedRule(UpdateRule):
    """Several optimizers: one of the weights of each of `optimizer.groups`, and of all others.

    With µP, they are divided further, by the factors on their learning rates (`rate_factor`).
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        parts = config.parts
        self._rules: list[tuple[UpdateRule, float]] = []
        self._of: dict[str, tuple[UpdateRule, Entry]] = {}
        self._scales: dict[str, float] = {}
        for part in parts:
            group = [entry for entry in self.entries if group_of(parts, entry.name) is part]  # on this rank
            factors = {entry.name: rate_factor(part.config, entry.role, entry.width) for entry in group}
            for factor in dict.fromkeys(factors.values()):
                alike = [replace(each, all_decay=part.all_decay) for each in group if factors[each.name] == factor]
                settings = part.config.model_copy(update={"weight_decay": part.config.weight_decay / factor})
                rule = update_rule(settings)(alike, settings)
                self._rules.append((rule, part.lr_scale * factor))
                self._of |= {entry.name: (rule, entry) for entry in alike}
                self._scales |= dict.fromkeys((entry.name for entry in alike), part.lr_scale * factor)

    def step(self, lr: float) -> None:
        for rule, scale in self._rules:
            rule.step(lr * scale)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        rule, grouped = self._of[entry.name]
        return rule.state(grouped)

    def is_replicated(self, entry: Entry, state: str, value: Tensor) -> bool:
        rule, grouped = self._of[entry.name]
        return rule.is_replicated(grouped, state, value)

    def restored(self) -> None:
        for rule, _ in self._rules:
            rule.restored()

    def weight_decay(self, entry: Entry) -> float:
        rule, grouped = self._of[entry.name]
        return rule.weight_decay(grouped)

    def lr_scale(self, entry: Entry) -> float:
        return self._scales[entry.name]


_OF_THE_SECTION = ("lr", "weight_decay")  # arguments that have their own settings


def update_rule(config: OptimizerConfig, width: float = 1.0) -> type[UpdateRule]:
    """Return a config's update rule, for a model with `ModelPlan.width`.

    Raises a `UserError` if `optimizer.name` is not one that can be imported.
    """
    if config.groups or width != 1:
        return GroupedRule
    found = OPTIMIZERS.load(config.name)
    if isinstance(found, type) and issubclass(found, UpdateRule):
        return found
    if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.optim.Optimizer)):
        raise UserError(
            f"optimizer.name is {shown(config.name)}, which is {shown(repr(found))} but must be a subclass of "
            "torch.optim.Optimizer, or a function that makes one."
        )
    return CustomOptimizer


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise a `UserError`, before any process starts, unless a user's optimizers step and can be sharded."""
    for part in (each.config for each in config.parts):
        if update_rule(part) is CustomOptimizer:
            for shape in ((4, 6), (6,)):
                _trial(part, torch.zeros(shape))


class CustomOptimizer(TorchRule):
    """Optimizer given by `optimizer.name` and `optimizer.arguments`.

    It reads `lr`, which follows the schedule, and, if its constructor takes it, `weight_decay`, which does not apply to
    biases and norms. For each parameter it may keep tensors of the parameter's shape, tensors without dims, and
    numbers; with `needs_whole_matrices` also tensors of other shapes, which all ranks that hold the weight share.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        self._whole = needs_whole_matrices(config)
        super().__init__(entries, config, self._whole)
        self._given: dict[str, dict[str, tuple[Tensor, torch.Size, type | None]]] = {}
        """State returned by `state`, by parameter; a checkpoint may fill it until the next step.

        Each has this rank's stored tensor, and the shape and number type that the optimizer keeps.
        """

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
                given[name] = self._updated.shard_of_state(entry, whole), whole.shape, number
        return {name: tensor for name, (tensor, _, _) in self._given[entry.name].items()}

    def is_replicated(self, entry: Entry, state: str, value: Tensor) -> bool:
        if not self._whole:
            return value.dim() == 0
        _, shape, _ = self._given[entry.name][state]
        return self._updated.is_replicated(entry, shape)

    def restored(self) -> None:
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
        like = torch.zeros(4, 6)
        return sum(isinstance(value, Tensor) and value.shape == like.shape for value in _trial(config, like).values())


def needs_whole_matrices(config: OptimizerConfig) -> bool:
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
        raise UserError(f"{_called(config)} cannot be made: {describe_error(error)}.") from error
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
        raise UserError(f"{_called(config)} cannot step: {describe_error(error)}.") from error
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
