"""The reference: one process with the plain model, torch's own optimizer and clip, the whole batch in one pass.

Nothing of the engine, of `parallel` and of `comm` is used, so a mistake in them cannot hide on both sides of the
comparison. Shared with the engine is what does not depend on the layout and has tests of its own: the single-device
layers of `models` with their kernels (`ops`), the keyed random numbers of weights and dropout (`random`), the
learning-rate schedule, and the update rule of an optimizer of another package (`reference_optimizers`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threefold.config import Config
from threefold.data.loader import Batch
from threefold.dtypes import DTYPES
from threefold.labels import IGNORE_INDEX
from threefold.models.construct import construct, drawn
from threefold.models.forward_errors import explaining_passes
from threefold.models.initial_values import Constant, Drawn, Initial, Normal
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.loss_terms import LossFunction, TermSums, count_terms
from threefold.models.own_batch import LayerSignature, batch_size, forward_layer, inputs_from
from threefold.models.sharding import ModelPlan
from threefold.models.source import ModelSource
from threefold.random.dropout import sample_keys
from threefold.random.keys import stream_key
from threefold.random.philox import fill_normal_
from threefold.torch_private.tensors import persistent_buffers
from threefold.train.schedule import learning_rate
from threefold.verify.batches import BatchSource
from threefold.verify.own_batches import OwnBatches
from threefold.verify.reference_optimizers import reference_optimizer

FILE = "one-process.pt"
CLIP_SHARE = 0.5
"""Share of the first gradient's norm to which gradients are clipped while verifying, where the config clips."""


@dataclass
class Trace:
    """What a run computed, by parameter name in model order.

    Attributes:
        initial: the weights before the first step.
        losses, norms: each step's loss, and gradient norm before the clip.
        gradients: each step's gradients of the parameters that are trained, before the clip and the update.
        weights: the weights after each step.
        buffers: the persistent buffers after each step.
        leverage: how far the updates of all steps together move each weight per relative error in the gradients.
        coefficients: what the clip multiplied the gradients of each step by.
        evaluations: step → the loss of its batch in evaluation mode, before the update.
        limit: the norm to which gradients were clipped; 0 for no clip.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    leverage: dict[str, Tensor] = field(default_factory=dict)
    coefficients: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    limit: float = 0.0
    buffers: list[dict[str, Tensor]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write it for the ranks of the layouts."""
        torch.save(self.__dict__, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "Trace":
        """Memory-mapped: a rank reads the parts that it compares."""
        return cls(**torch.load(folder / FILE, mmap=True, weights_only=True))


class OneProcess:
    """Training on one device, step by step.

    Args:
        make_model: the model's `forward(tokens, labels, samples)` returns the summed loss of the valid labels; with
            `loss`, its `forward` takes the inputs of a batch, or it has none and its layers are called one by one.
        plan: for the initial values, and the layers of a model without a `forward`.
        config: resolved; its layout is not read.
        loss: of the model's output and the batch.
        clip_share: clip to this share of the first gradient's norm, where the config clips at all, so that the clip is
            active; None for the limit of the config.

    Attributes:
        trace: of the steps made so far.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        plan: ModelPlan,
        config: Config,
        loss: LossFunction | None = None,
        clip_share: float | None = None,
    ) -> None:
        self.plan, self.config, self.loss, self.clip_share = plan, config, loss, clip_share
        self.model = _with_floats(construct(make_model, config.train.seed), DTYPES[config.precision.dtype])
        self.parameters = dict(self.model.named_parameters())
        for name, parameter in self.parameters.items():
            _draw_(parameter, plan.initial(name), name, config.train.seed)
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.optimizer = reference_optimizer(self.trained, config.optimizer, plan)
        leverage = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        limit = 0.0 if clip_share else config.optimizer.clip_grad_norm
        self.trace = Trace(initial=_copies(self.parameters), leverage=leverage, limit=limit)

    def step(self, batch: Any, step: int, updates: bool = True, evaluates: bool = False) -> None:
        """One step.

        Args:
            batch: the global batch.
            step: its number, from 0; for the dropout masks and the learning rate.
            updates: whether the weights are updated.
            evaluates: whether the loss of the batch is evaluated before the update.
        """
        trace, parameters, before = self.trace, self.parameters, self._buffers()
        self.model.zero_grad()
        mean = self._mean_loss(batch, step)
        mean.backward()
        gradients = {name: _gradient(parameter) for name, parameter in self.trained.items()}
        if evaluates:
            trace.evaluations[len(trace.losses)] = self._evaluate(batch)
        trace.losses.append(mean.item())
        trace.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        trace.norms.append(torch.nn.utils.get_total_norm(list(gradients.values())).item())
        if updates:
            self._update(step)
        else:
            trace.coefficients.append(1.0)
            self._put_back(before)
        trace.weights.append(_copies(parameters))
        trace.buffers.append(self._persistent_buffers())

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """Return copies of the persistent buffers, by their names in the whole model."""
        found: dict[str, Tensor] = {}
        for prefix, module in self.model.named_modules():
            for name, buffer in persistent_buffers(module):
                found[self.plan.whole_name(f"{prefix}.{name}" if prefix else name)] = buffer.clone()
        return found

    @torch.no_grad()
    def _evaluate(self, batch: Any) -> float:
        before, modes = self._buffers(), [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        loss = self._mean_loss(batch, None).item()
        self.model.train()
        for module, mode in modes:
            module.training = mode
        self._put_back(before)
        return loss

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    @torch.no_grad()
    def _put_back(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])

    def _update(self, step: int) -> None:
        trace, trained = self.trace, self.trained
        if not trace.limit and self.clip_share and self.config.optimizer.clip_grad_norm:
            trace.limit = trace.norms[-1] * self.clip_share
        torch.nn.utils.clip_grad_norm_(trained.values(), trace.limit or float("inf"))
        clipped = torch.nn.utils.get_total_norm([_gradient(parameter) for parameter in trained.values()]).item()
        trace.coefficients.append(clipped / trace.norms[-1] if trace.norms[-1] else 1.0)
        lr = learning_rate(step + 1, self.config.optimizer)
        self.optimizer.step(lr)
        for name in trained:
            trace.leverage[name] += lr * self.optimizer.leverage(name)

    def _mean_loss(self, batch: Any, step: int | None) -> Tensor:
        """The mean loss of a batch; without a step, nothing is dropped."""
        return reference_loss(self.model, self.plan, batch, step, self.config, self.loss)


def one_process(
    make_model: Callable[[], nn.Module],
    plan: ModelPlan,
    config: Config,
    rows: BatchSource | OwnBatches,
    steps: int,
    loss: LossFunction | None = None,
    clip_share: float | None = None,
) -> Trace:
    """Train for `steps` steps on one device.

    Args:
        make_model, plan, config, loss, clip_share: as of `OneProcess`.
        rows: the global batches.
    """
    run = OneProcess(make_model, plan, config, loss, clip_share)
    for step in range(steps):
        run.step(rows.batch(config, step), step, evaluates=step == evaluated_step(steps))
    return run.trace


def evaluated_step(steps: int) -> int:
    """The step, from 0, between whose gradients and update the loss is evaluated too: one that others follow, which
    what the evaluation leaves behind would change."""
    return min(1, steps - 1)


def reference_loss(
    model: nn.Module,
    plan: ModelPlan,
    batch: Any,
    step: int | None,
    config: Config,
    loss: LossFunction | None,
    by_layers: bool = False,
) -> Tensor:
    """The mean loss of a global batch, in one pass of the plain model; arguments as of `one_process`.

    Args:
        step: from 0, for the dropout masks; None for a pass in which nothing is dropped.
        by_layers: call the layers one by one, as training does, whatever `forward` the model has.
    """
    if loss is None:
        return _token_loss(model, batch, step, config)
    return _own_loss(model, plan, batch, step, config, loss, by_layers)


def write_trace(
    source: ModelSource,
    config: Config,
    rows: BatchSource | OwnBatches,
    steps: int,
    folder: str,
) -> list[float]:
    """Run one process, with a clip that is active, and write its trace to `folder`; returns the losses."""
    make_model, plan = source.load(config)
    with explaining_passes(()) if plan.constructed else nullcontext():
        trace = one_process(make_model, plan, config, rows, steps, source.loss(config), CLIP_SHARE)
    trace.save(Path(folder))
    return trace.losses


def _token_loss(model: nn.Module, batch: Any, step: int | None, config: Config) -> Tensor:
    """The mean loss of a batch of tokens, which the model computes."""
    keys = None if step is None else sample_keys(config.train.seed, step, batch.rows)
    counted = batch.labels != IGNORE_INDEX
    weights = None if step is None else counted.double() / counted.sum()
    samples = SampleInfo(keys, batch.documents, weights, batch.positions)
    mean: Tensor = model(batch.tokens, batch.labels, samples) / counted.sum()
    return mean


def has_forward(model: nn.Module) -> bool:
    """Whether a model has a `forward`; else its layers are called one by one."""
    return type(model).forward is not nn.Module.forward


def _own_loss(
    model: nn.Module,
    plan: ModelPlan,
    batch: Any,
    step: int | None,
    config: Config,
    loss: LossFunction,
    by_layers: bool = False,
) -> Tensor:
    """The mean loss of a batch of the user's own model: forward once through the model, or through its layers."""
    if isinstance(batch, Batch):
        batch = (batch.tokens, batch.labels)
    size = batch_size(batch)
    keys = None if step is None else sample_keys(config.train.seed, step, torch.arange(size))
    samples = NOTHING if keys is None else SampleInfo(keys)
    dtype = DTYPES[config.precision.dtype]
    if has_forward(model) and not by_layers:
        whole = LayerSignature.of("the model", model)
        output = forward_layer(model, whole, whole.inputs_of(batch, dtype), samples)
    else:
        output = None
        for place, name in enumerate(plan.layers):
            signature = LayerSignature.of(name, model.get_submodule(name))
            inputs = inputs_from(output, plan.layers[place - 1]) if place else signature.inputs_of(batch, dtype)
            output = forward_layer(model.get_submodule(name), signature, inputs, samples)
    return TermSums(loss, count_terms(loss, batch, size))(output, batch, size)


def _with_floats(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the floats of a model, and leave its complex buffers as they are, whose imaginary part would be lost."""
    complexes = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_complex()
    ]
    for module, name, _ in complexes:
        setattr(module, name, None)
    model.to(dtype)
    for module, name, buffer in complexes:
        setattr(module, name, buffer)
    return model


@torch.no_grad()
def _draw_(parameter: nn.Parameter, initial: Initial, name: str, seed: int) -> None:
    """Set a whole parameter to its initial values, unless it has them from the model's constructor."""
    if isinstance(initial, Normal):
        key = stream_key("weights", seed, name)
        fill_normal_(parameter, initial.std, key, tuple(parameter.shape), (0,) * parameter.dim())
    elif isinstance(initial, Constant):
        parameter.fill_(initial.value)
    elif isinstance(initial, Drawn):
        parameter.copy_(drawn(initial.fill, name, tuple(parameter.shape), seed))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # not used by the loss: zero, as in the engine's cleared buffers
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _copies(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
