"""Optimizers of the reference run, over the parameters of the whole model: torch's, and others by their formulas."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.models.sharding import ModelPlan
from threefold.parallel.gradients import Gradients, Observer
from threefold.parallel.parameter import make_weights
from threefold.train.optim import Optimizer
from threefold.train.optimizers import update_rule


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@dataclass
class ReferenceOptimizer(ABC):
    """Reference optimizer over the parameters of the whole model, by name."""

    parameters: dict[str, nn.Parameter]
    config: OptimizerConfig
    plan: ModelPlan
    all_decay: bool = False

    @abstractmethod
    def __post_init__(self) -> None:
        """Make the optimizer's state."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update the parameters from their `.grad`."""

    @abstractmethod
    def leverage(self, name: str) -> Tensor | float:
        """Return how far the last update, at learning rate 1, moves each element per relative error of the gradient.

        A relative error δ is an error of δ times the gradient's largest magnitude.
        """

    def _decay(self, name: str) -> float:
        return self.config.weight_decay if self.all_decay or not self._is_vector(name) else 0.0

    def _is_vector(self, name: str) -> bool:
        """Return whether a parameter is a vector, or the biases of experts, one vector for each."""
        return self.parameters[name].dim() < 2 or name.endswith(("experts.gate_up_bias", "experts.down_bias"))

    def _largest(self, name: str) -> float:
        return float(gradient_of(self.parameters[name]).abs().max())


class _Torch(ReferenceOptimizer):
    """Reference for AdamW, Adam and SGD: `torch.optim`."""

    def __post_init__(self) -> None:
        config = self.config
        groups = [{"params": [each], "weight_decay": self._decay(name)} for name, each in self.parameters.items()]
        self._optimizer: torch.optim.Optimizer
        if config.name == "sgd":
            self._optimizer = torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov)
        else:
            make = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
            self._optimizer = make(groups, betas=config.betas, eps=config.eps)

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def leverage(self, name: str) -> Tensor | float:
        """Bound the movement by an error δ: δ·G / (1 − momentum) for SGD, δ·G / (√v + ε) for Adam (bias-corrected v).

        For gradients that are only rounding noise (a key bias, which softmax ignores), Adam's bound rightly far exceeds
        δ.
        """
        if self.config.name == "sgd":
            return self._largest(name) / (1 - self.config.momentum)
        state = self._optimizer.state[self.parameters[name]]
        variance = state["exp_avg_sq"] / (1 - self.config.betas[1] ** float(state["step"]))
        return self._largest(name) / (variance.sqrt() + self.config.eps)


class _Lion(ReferenceOptimizer):
    """Reference for Lion: algorithm 2 of arXiv 2302.06675."""

    def __post_init__(self) -> None:
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self._signed: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        beta1, beta2 = self.config.betas
        for name, parameter in self.parameters.items():
            gradient, momentum = gradient_of(parameter), self._momentum[name]
            self._signed[name] = beta1 * momentum + (1 - beta1) * gradient
            parameter.sub_(lr * (self._signed[name].sign() + self._decay(name) * parameter))
            self._momentum[name] = beta2 * momentum + (1 - beta2) * gradient

    def leverage(self, name: str) -> Tensor | float:
        """Bound the movement: an error of δ·G flips the sign of any smaller value, and moves the weight by 2."""
        tiny = torch.finfo(self._signed[name].dtype).tiny
        return 2 * self._largest(name) / self._signed[name].abs().clamp(min=tiny)


class _Muon(ReferenceOptimizer):
    """Reference for Muon: weights of two or more dims between the first and the last layer; AdamW for the others.

    With multi-token prediction, its blocks in the last layer are between them too.
    """

    def __post_init__(self) -> None:
        outside = (f"{self.plan.layers[0]}.", f"{self.plan.layers[-1]}.")
        further = (f"{self.plan.layers[-1]}.depths.",) if self.plan.terms else ()
        whole = {name: self.plan.whole_name(name) for name in self.parameters}
        others = {
            name: parameter
            for name, parameter in self.parameters.items()
            if self._is_vector(name) or (whole[name].startswith(outside) and not whole[name].startswith(further))
        }
        self._others = _Torch(others, self.config, self.plan, self.all_decay) if others else None
        self._momentum = {name: torch.zeros_like(p) for name, p in self.parameters.items() if name not in others}
        self._norms: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        mu = self.config.momentum
        for name, momentum in self._momentum.items():
            weight = self.parameters[name]
            gradient = gradient_of(weight)
            momentum.mul_(mu).add_((1 - mu) * gradient)
            update = mu * momentum + (1 - mu) * gradient if self.config.nesterov else momentum.clone()
            matrices = update.flatten(0, -3) if update.dim() > 2 else update.unsqueeze(0)
            norms = [max(float(matrix.norm()), 1e-7) for matrix in matrices]
            matrices = torch.stack([self._orthogonalised(matrix) for matrix in matrices])
            weight.mul_(1 - lr * self._decay(name))
            weight.sub_(lr * self._scale(name) * matrices.view_as(weight))
            self._norms[name] = torch.tensor(norms, dtype=weight.dtype).view(*weight.shape[:-2], 1, 1)
        if self._others is not None:
            self._others.step(lr)

    def leverage(self, name: str) -> Tensor | float:
        """Bound the movement: an error of δ·G per element is one of δ·G·√(m·n) in the norm of the matrix.

        Each iteration amplifies small singular values, and errors of the normalized matrix, by at most 3.4445.
        """
        if name not in self._momentum:
            assert self._others is not None
            return self._others.leverage(name)
        *_, rows, columns = self.parameters[name].shape
        amplified = 3.4445**self.config.newton_schulz_steps * (rows * columns) ** 0.5
        return self._largest(name) * amplified * self._scale(name) / self._norms[name]

    def _orthogonalised(self, matrix: Tensor) -> Tensor:
        """Orthogonalize by the quintic iteration of https://kellerjordan.github.io/posts/muon, without bf16."""
        if matrix.shape[0] > matrix.shape[1]:
            return self._orthogonalised(matrix.T).T
        matrix = matrix / max(float(matrix.norm()), 1e-7)
        for _ in range(self.config.newton_schulz_steps):
            square = matrix @ matrix.T
            matrix = 3.4445 * matrix - 4.7750 * square @ matrix + 2.0315 * square @ square @ matrix
        return matrix

    def _scale(self, name: str) -> float:
        *_, rows, columns = self.parameters[name].shape
        original = self.config.lr_scaling == "original"
        return max(1.0, rows / columns) ** 0.5 if original else 0.2 * max(rows, columns) ** 0.5


_OPTIMIZERS: dict[str, type[ReferenceOptimizer]] = {
    **dict.fromkeys(("adamw", "adam", "sgd"), _Torch),
    "lion": _Lion,
    "muon": _Muon,
}
"""Reference of each built-in optimizer."""


class _WholeGradients(Gradients):
    def __getitem__(self, leaf: Tensor) -> Tensor:
        assert leaf.grad is not None
        return leaf.grad

    def begin(self, arrivals: int | None) -> None: ...

    def finish(self) -> None: ...

    def is_in_norm(self, leaf: Tensor) -> bool:
        return True

    def scale_(self, factor: float) -> None: ...

    def observe(self, observer: Observer | None) -> None: ...


class _Added(ReferenceOptimizer):
    """Reference for another package's update rule, run a second time on slightly wrong gradients."""

    def __post_init__(self) -> None:
        self._disturbed = {name: nn.Parameter(each.detach().clone()) for name, each in self.parameters.items()}
        self._generator = torch.Generator().manual_seed(0)
        self._leverage: dict[str, Tensor] = {}
        config, dtype = self.config, next(iter(self.parameters.values())).dtype
        if self.all_decay:
            config = config.model_copy(update={"groups": ({"match": "**", "weight_decay": config.weight_decay},)})
        rule = update_rule(config)
        self._optimizers = [
            Optimizer(rule, make_weights(each.items(), dtype), _WholeGradients(), config, self.plan, axes=())
            for each in (self.parameters, self._disturbed)
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        before = {name: self._distance(name) for name in self.parameters}
        for name, disturbed in self._disturbed.items():
            gradient = gradient_of(self.parameters[name])
            signs = torch.randint(0, 2, gradient.shape, generator=self._generator) * 2 - 1
            disturbed.grad = gradient + _DISTURBANCE * self._largest(name) * signs
        for optimizer in self._optimizers:
            optimizer.step(lr)
        for name in self.parameters:
            moved = (self._distance(name) - before[name]).abs()
            self._leverage[name] = moved / (_DISTURBANCE * lr) if lr else torch.zeros_like(moved)

    def leverage(self, name: str) -> Tensor | float:
        return self._leverage[name]

    def _distance(self, name: str) -> Tensor:
        return (self._disturbed[name] - self.parameters[name]).detach()


class _Groups(ReferenceOptimizer):
    """Reference for `optimizer.groups` and µP: for each parameter an optimizer with the settings of its group."""

    def __post_init__(self) -> None:
        given: list[dict[str, Any]] = [{"match": "**"}, *(self.config.groups or ())]
        self._of: dict[str, tuple[float, ReferenceOptimizer]] = {}
        left = dict(self.parameters)
        for group in reversed(given):
            parts = group["match"].split(".")
            mine = {name: left.pop(name) for name in list(left) if _begins(name.split("."), parts)}
            settings = self._settings(group)
            for name, parameter in mine.items():  # an optimizer each, as with µP each has its learning rate
                factor = self._of_width(name, settings)
                decayed = settings.model_copy(update={"weight_decay": settings.weight_decay / factor})
                made = _alone({name: parameter}, decayed, self.plan, "weight_decay" in group)
                self._of[name] = factor * group.get("lr_scale", 1.0), made

    def _of_width(self, name: str, settings: OptimizerConfig) -> float:
        """Return µP's factor on the learning rate of a parameter: tables 3 and 8 of arXiv 2203.03466.

        For Muon, so that the spectral norm of an update is that of √(rows / columns) times a constant.
        """
        width, last = self.plan.width, name.split(".")[-2:]
        in_block = name.startswith("blocks.") and not self._is_vector(name)
        to_few = in_block and last[0] in ("router", "shared_gate")
        if settings.name == "sgd":
            of_few = name.startswith("blocks.") and (last in (["router", "bias"], ["core", "sinks"]))
            fixed = of_few or last[0] in ("q_norm", "k_norm")
            return 1 / width if to_few else 1.0 if in_block or fixed else width
        if settings.name != "muon" or not in_block:
            return 1 / width if in_block else 1.0
        grown = width**0.5 if settings.lr_scaling == "match_rms_adamw" else 1.0
        return (width**-0.5 if to_few else 1.0) / grown

    def _settings(self, group: dict[str, Any]) -> OptimizerConfig:
        values = self.config.settings()
        values.pop("groups", None)
        if group.get("name", values["name"]) != values["name"]:
            row = BUILT_IN.get(group["name"])
            values = {key: each for key, each in values.items() if key in ("lr", "weight_decay")}
            values |= {key: default for key, default in (row.reads if row else {}).items() if default is not None}
        values |= {key: each for key, each in group.items() if key not in ("match", "lr_scale")}
        return OptimizerConfig.model_validate(values)

    def step(self, lr: float) -> None:
        for scale, optimizer in self._of.values():
            optimizer.step(scale * lr)

    def leverage(self, name: str) -> Tensor | float:
        scale, optimizer = self._of[name]
        return scale * optimizer.leverage(name)


def _begins(name: list[str], pattern: list[str]) -> bool:
    """Return whether the parts of a name begin with those of a pattern, `**` being one or more of them."""
    if not pattern or not name:
        return not pattern
    if pattern[0] == "**":
        return _begins(name[1:], pattern[1:]) or _begins(name[1:], pattern)
    return fnmatchcase(name[0], pattern[0]) and _begins(name[1:], pattern[1:])


def reference_optimizer(
    parameters: dict[str, nn.Parameter], config: OptimizerConfig, plan: ModelPlan
) -> ReferenceOptimizer:
    if config.groups or plan.width != 1:
        return _Groups(parameters, config, plan)
    return _alone(parameters, config, plan)


def _alone(
    parameters: dict[str, nn.Parameter], config: OptimizerConfig, plan: ModelPlan, all_decay: bool = False
) -> ReferenceOptimizer:
    return _OPTIMIZERS.get(config.name, _Added)(parameters, config, plan, all_decay)


_DISTURBANCE = 1e-3
"""Relative gradient error whose effect is measured: far above rounding, small enough to act proportionally."""
