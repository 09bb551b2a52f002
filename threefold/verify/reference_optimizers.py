"""The optimizers of one process: torch's own, and Lion and Muon by their formulas; and how far each update follows
errors of the gradient.

Nothing of `train/optimizers` is used. For an optimizer of another package, which nothing else defines, its own update
rule runs on the whole tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.models.sharding import ModelPlan
from threefold.parallel.data.grad_buckets import Gradients, Observer
from threefold.parallel.weights import make_weights
from threefold.train.optimizer import Optimizer


class ReferenceOptimizer(ABC):
    """Updates whole parameters.

    Args:
        parameters: of the whole model, by name.
        config: resolved.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters, self.config = dict(parameters), config

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update from the parameters' `.grad`."""

    @abstractmethod
    def leverage(self, name: str) -> Tensor | float:
        """How far the update just made, at learning rate 1, moves each element of a weight per relative error of its
        gradient: an error of δ times the gradient's largest magnitude."""

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None
        return gradient

    def _decay(self, name: str) -> float:
        return self.config.weight_decay if self.parameters[name].dim() >= 2 else 0.0

    def _largest(self, name: str) -> float:
        return float(self._gradient(name).abs().max())


def reference_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, plan: ModelPlan
) -> ReferenceOptimizer:
    """The optimizer that a config names.

    Args:
        parameters: of the whole model, by name.
        config: resolved.
        plan: which layers are the first and the last.
    """
    if config.name == "muon":
        return _Muon(parameters, config, plan)
    kinds = {"adamw": _Torch, "adam": _Torch, "sgd": _Torch, "lion": _Lion}
    return kinds[config.name](parameters, config) if config.name in BUILT_IN else _Added(parameters, config, plan)


class _Torch(ReferenceOptimizer):
    """AdamW, Adam and SGD of `torch.optim`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(parameters, config)
        decayed = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
        others = [parameter for parameter in parameters.values() if parameter.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if config.name == "sgd":
            sgd = torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov)
            self._optimizer: torch.optim.Optimizer = sgd
        else:
            make = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
            self._optimizer = make(groups, betas=config.betas, eps=config.eps)

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def leverage(self, name: str) -> Tensor | float:
        """SGD moves by at most δ·G / (1 − momentum). Adam divides by √v + ε (bias corrected), so by δ·G / (√v + ε): for
        gradients that are rounding noise alone (a key bias, which softmax ignores) that is far more than δ, and no
        mistake. The bound falls to that of SGD's kind where the gradient is a gradient."""
        if self.config.name == "sgd":
            return self._largest(name) / (1 - self.config.momentum)
        state = self._optimizer.state[self.parameters[name]]
        variance = state["exp_avg_sq"] / (1 - self.config.betas[1] ** float(state["step"]))
        return self._largest(name) / (variance.sqrt() + self.config.eps)


class _Lion(ReferenceOptimizer):
    """Algorithm 2 of arXiv 2302.06675."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(parameters, config)
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._signed: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        beta1, beta2 = self.config.betas
        for name, parameter in self.parameters.items():
            gradient, momentum = self._gradient(name), self._momentum[name]
            self._signed[name] = beta1 * momentum + (1 - beta1) * gradient
            parameter.sub_(lr * (self._signed[name].sign() + self._decay(name) * parameter))
            self._momentum[name] = beta2 * momentum + (1 - beta2) * gradient

    def leverage(self, name: str) -> Tensor | float:
        """An error of δ·G turns the sign of what is no larger, and moves the weight by 2."""
        tiny = torch.finfo(self._signed[name].dtype).tiny
        return 2 * self._largest(name) / self._signed[name].abs().clamp(min=tiny)


class _Muon(ReferenceOptimizer):
    """Muon of each weight of two dims or more between the first and the last layer, AdamW of the others."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, plan: ModelPlan) -> None:
        super().__init__(parameters, config)
        outside = (f"{plan.layers[0]}.", f"{plan.layers[-1]}.")
        others = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.dim() < 2 or plan.whole_name(name).startswith(outside)
        }
        self._others = _Torch(others, config)
        self._momentum = {name: torch.zeros_like(p) for name, p in parameters.items() if name not in others}
        self._norms: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        mu = self.config.momentum
        for name, momentum in self._momentum.items():
            weight, gradient = self.parameters[name], self._gradient(name)
            momentum.mul_(mu).add_((1 - mu) * gradient)
            update = mu * momentum + (1 - mu) * gradient if self.config.nesterov else momentum.clone()
            matrices = update.flatten(0, -3) if update.dim() > 2 else update.unsqueeze(0)
            norms = [max(float(matrix.norm()), 1e-7) for matrix in matrices]
            matrices = torch.stack([self._orthogonalised(matrix) for matrix in matrices])
            weight.mul_(1 - lr * self._decay(name))
            weight.sub_(lr * self._scale(name) * matrices.view_as(weight))
            self._norms[name] = torch.tensor(norms, dtype=weight.dtype).view(*weight.shape[:-2], 1, 1)
        self._others.step(lr)

    def leverage(self, name: str) -> Tensor | float:
        """An iteration makes small singular values, and an error of the normalised matrix, at most 3.4445 times as
        large; an error of δ·G in each element is one of δ·G·√(m·n) in the norm of the matrix."""
        if name not in self._momentum:
            return self._others.leverage(name)
        *_, rows, columns = self.parameters[name].shape
        amplified = 3.4445**self.config.newton_schulz_steps * (rows * columns) ** 0.5
        return self._largest(name) * amplified * self._scale(name) / self._norms[name]

    def _orthogonalised(self, matrix: Tensor) -> Tensor:
        """The quintic iteration of https://kellerjordan.github.io/posts/muon, without bf16."""
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


class _WholeGradients(Gradients):
    """The `.grad` of whole parameters."""

    def __getitem__(self, leaf: Tensor) -> Tensor:
        assert leaf.grad is not None
        return leaf.grad

    def begin(self, arrivals: int | None) -> None: ...

    def finish(self) -> None: ...

    def is_in_norm(self, leaf: Tensor) -> bool:
        return True

    def weights_changed(self) -> None: ...

    def scale_(self, factor: float) -> None: ...

    def observe(self, observer: Observer | None) -> None: ...


class _Added(ReferenceOptimizer):
    """The update rule of another package, and the same beside it on slightly wrong gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, plan: ModelPlan) -> None:
        super().__init__(parameters, config)
        self._disturbed = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
        self._generator = torch.Generator().manual_seed(0)
        self._leverage: dict[str, Tensor] = {}
        self._optimizers = [self._make(weights, plan) for weights in (self.parameters, self._disturbed)]

    def _make(self, weights: Mapping[str, nn.Parameter], plan: ModelPlan) -> Optimizer:
        dtype = next(iter(weights.values())).dtype
        return Optimizer(make_weights(weights.items(), dtype), _WholeGradients(), self.config, plan, axes=())

    @torch.no_grad()
    def step(self, lr: float) -> None:
        before = {name: self._distance(name) for name in self.parameters}
        for name, disturbed in self._disturbed.items():
            gradient = self._gradient(name)
            signs = torch.randint(0, 2, gradient.shape, generator=self._generator) * 2 - 1
            disturbed.grad = gradient + _DISTURBANCE * self._largest(name) * signs
        for optimizer in self._optimizers:
            optimizer.step(lr)
        for name in self.parameters:
            moved = (self._distance(name) - before[name]).abs()
            self._leverage[name] = moved / (_DISTURBANCE * lr) if lr else torch.zeros_like(moved)

    def leverage(self, name: str) -> Tensor | float:
        """Measured."""
        return self._leverage[name]

    def _distance(self, name: str) -> Tensor:
        return (self._disturbed[name] - self.parameters[name]).detach()


_DISTURBANCE = 1e-3
"""Relative error of the gradients whose effect is measured: far above rounding, small enough to act in proportion."""
