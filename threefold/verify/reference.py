"""The reference: one process with the plain model, torch's own optimizer and clip, the whole batch in one pass.

Nothing of the engine, of `parallel` and of `comm` is used, so a mistake in them cannot hide on both sides of the
comparison. Shared with the engine is what does not depend on the layout and has tests of its own: the single-device
layers of `models` with their kernels (`ops`), the keyed random numbers of weights and dropout (`random`), the
learning-rate schedule, and the update rule of an optimizer of another package (`reference_optimizers`).
"""

from collections.abc import Callable
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
from threefold.models.initial_values import Constant, Drawn, Initial, Normal
from threefold.models.layers.decoder import SampleInfo
from threefold.models.loss_terms import LossFunction, TermSums, count_terms
from threefold.models.own_batch import LayerSignature, batch_size, forward_layer, inputs_from
from threefold.models.sharding import ModelPlan
from threefold.models.source import ModelSource
from threefold.random.dropout import sample_keys
from threefold.random.keys import stream_key
from threefold.random.philox import fill_normal_
from threefold.train.schedule import learning_rate
from threefold.verify.batches import BatchSource
from threefold.verify.own_batches import OwnBatches
from threefold.verify.reference_optimizers import reference_optimizer

FILE = "one-process.pt"


@dataclass
class Trace:
    """What a run computed, by parameter name in model order.

    Attributes:
        initial: the weights before the first step.
        losses, norms: each step's loss, and gradient norm before the clip.
        gradients: each step's gradients of the parameters that are trained, before the clip and the update.
        weights: the weights after each step.
        leverage: how far the updates of all steps together move each weight per relative error in the gradients.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    leverage: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it for the ranks of the layouts."""
        torch.save(self.__dict__, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "Trace":
        """Memory-mapped: a rank reads the parts that it compares."""
        return cls(**torch.load(folder / FILE, mmap=True, weights_only=True))


def one_process(
    make_model: Callable[[], nn.Module],
    plan: ModelPlan,
    config: Config,
    rows: BatchSource | OwnBatches,
    steps: int,
    loss: LossFunction | None = None,
) -> Trace:
    """Train for `steps` steps on one device.

    Args:
        make_model: the model's `forward(tokens, labels, samples)` returns the summed loss of the valid labels; with
            `loss`, its `forward` takes the inputs of a batch, or it has none and its layers are called one by one.
        plan: for the initial values, and the layers of a model without a `forward`.
        config: resolved; its layout is not read.
        rows: the global batches.
        loss: of the model's output and the batch.
    """
    model = construct(make_model, config.train.seed).to(DTYPES[config.precision.dtype])
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        _draw_(parameter, plan.initial(name), name, config.train.seed)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    optimizer = reference_optimizer(trained, config.optimizer, plan)
    trace = Trace(initial=_copies(parameters))
    trace.leverage = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for step in range(steps):
        batch = rows.batch(config, step)
        model.zero_grad()
        mean = (
            _token_loss(model, batch, step, config)
            if loss is None
            else _own_loss(model, plan, batch, step, config, loss)
        )
        mean.backward()
        gradients = {name: _gradient(parameter) for name, parameter in trained.items()}
        trace.losses.append(mean.item())
        trace.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        trace.norms.append(torch.nn.utils.get_total_norm(list(gradients.values())).item())
        torch.nn.utils.clip_grad_norm_(trained.values(), config.optimizer.clip_grad_norm or float("inf"))
        lr = learning_rate(step + 1, config.optimizer)
        optimizer.step(lr)
        for name in trained:
            trace.leverage[name] += lr * optimizer.leverage(name)
        trace.weights.append(_copies(parameters))
    return trace


def write_trace(
    source: ModelSource,
    config: Config,
    rows: BatchSource | OwnBatches,
    steps: int,
    folder: str,
) -> list[float]:
    """Run one process and write its trace to `folder`; returns the losses."""
    make_model, plan = source.load(config)
    trace = one_process(make_model, plan, config, rows, steps, source.loss(config))
    trace.save(Path(folder))
    return trace.losses


def _token_loss(model: nn.Module, batch: Any, step: int, config: Config) -> Tensor:
    """The mean loss of a batch of tokens, which the model computes."""
    keys = sample_keys(config.train.seed, step, batch.rows)
    counted = batch.labels != IGNORE_INDEX
    samples = SampleInfo(keys, batch.documents, counted.double() / counted.sum())
    mean: Tensor = model(batch.tokens, batch.labels, samples) / counted.sum()
    return mean


def _own_loss(model: nn.Module, plan: ModelPlan, batch: Any, step: int, config: Config, loss: LossFunction) -> Tensor:
    """The mean loss of a batch of the user's own model: forward once through the model, or through its layers."""
    if isinstance(batch, Batch):
        batch = (batch.tokens, batch.labels)
    size = batch_size(batch)
    samples = SampleInfo(sample_keys(config.train.seed, step, torch.arange(size)))
    dtype = DTYPES[config.precision.dtype]
    if type(model).forward is not nn.Module.forward:
        whole = LayerSignature.of("the model", model)
        output = forward_layer(model, whole, whole.inputs_of(batch, dtype), samples)
    else:
        output = None
        for place, name in enumerate(plan.layers):
            signature = LayerSignature.of(name, model.get_submodule(name))
            inputs = inputs_from(output, plan.layers[place - 1]) if place else signature.inputs_of(batch, dtype)
            output = forward_layer(model.get_submodule(name), signature, inputs, samples)
    return TermSums(loss, count_terms(loss, batch, size))(output, batch, size)


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
