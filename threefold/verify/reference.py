"""Reference run: one process with the plain model, torch's own optimizer and clip, and the whole batch in one pass.

It uses nothing of the engine, `parallel` or `comm`, so a mistake there cannot hide on both sides of the comparison. It
shares with the engine only parts that do not depend on the layout and have their own tests: the single-device layers of
`models` with their kernels (`ops`), the keyed random numbers of weights and dropout (`random`), the learning-rate
schedule, and the update rule of another package's optimizer.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from threefold.config import Config
from threefold.config.preference import PreferenceConfig
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch
from threefold.dtypes import DTYPES
from threefold.models.custom_batch import LayerSignature, batch_size, forward_layer, inputs_from
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.layers.experts import Choice, Routing
from threefold.models.loss_terms import LossFunction, TermSums, count_terms
from threefold.models.sharding import Constant, Drawn, ModelPlan, Normal
from threefold.models.source import ModelSource, construct, drawn
from threefold.random.dropout import sample_keys
from threefold.random.rng import fill_normal_, stream_key
from threefold.torch_private.distributed import persistent_buffers
from threefold.train.optim import learning_rate
from threefold.verify.batches import BatchSource
from threefold.verify.module_check import explaining_passes
from threefold.verify.proposal import has_forward
from threefold.verify.reference_optimizers import gradient_of, reference_optimizer

FILE = "one-process.pt"
SAMPLES, TOKENS, READ, RATE = "samples", "valid tokens", "tokens read", "learning rate"
"""Numbers that a run logs of a step."""
CLIP_SHARE = 0.5
"""Fraction of the first gradient norm that gradients are clipped to while verifying, if the config clips."""


@dataclass
class Trace:
    """Results of a run, by parameter name in model order.

    Attributes:
        losses, norms: loss and unclipped gradient norm of each step.
        gradients: gradients of the trained parameters in each step, before the clip and the update.
        weights, buffers: weights and persistent buffers after each step.
        averages: moving averages of the trained weights after each step; empty without one.
        reported: numbers that a run logs of each step, by kind (`SAMPLES`, …).
        updates: number of updates made after each step.
        leverage: total movement of each weight, over all steps, per relative error in the gradients.
        coefficients: clip coefficient of each step.
        evaluations: step → loss of its batch in evaluation mode, before the update.
        limit: norm that gradients were clipped to; 0 for no clip.
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
    reported: list[dict[str, float]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    averages: list[dict[str, Tensor]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        torch.save(self.__dict__, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "Trace":
        """Load a trace memory-mapped, as a rank reads only the parts that it compares."""
        return cls(**torch.load(folder / FILE, mmap=True, weights_only=True))


class OneProcess:
    """Training on one device, step by step, with a trace; the config's layout is ignored.

    Args:
        make_model: constructs a model whose `forward(tokens, labels, samples)` returns the summed loss of the valid
            labels; with `loss`, its `forward` takes the inputs of a batch, or its layers are called one by one.
        plan: plan of the initial values, and of the layers of a model without a `forward`.
        loss: function of the model's output and the batch.
        clip_fraction: part of the first gradient norm to clip to, if the config clips at all, so that it is active;
            None for the config's limit.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        plan: ModelPlan,
        config: Config,
        loss: LossFunction | None = None,
        clip_fraction: float | None = None,
    ) -> None:
        self.plan, self.config, self.loss, self.clip_fraction = plan, config, loss, clip_fraction
        self.model = construct(make_model, config.train.seed)
        convert_floats_(self.model, DTYPES[config.precision.dtype])
        parameters = dict(self._parameters())
        for name in plan.frozen.intersection(parameters):
            parameters[name].requires_grad_(False)
        for name, parameter in parameters.items():
            initial, shape = plan.initial(name), tuple(parameter.shape)
            with torch.no_grad():  # the constructor has set all others
                if isinstance(initial, Normal):
                    key = stream_key("weights", config.train.seed, name)
                    fill_normal_(parameter, initial.std, key, shape, (0,) * parameter.dim())
                elif isinstance(initial, Constant):
                    parameter.fill_(initial.value)
                elif isinstance(initial, Drawn):
                    parameter.copy_(drawn(initial.fill, name, shape, config.train.seed))
        self._routings = [
            each
            for name, each in self.model.named_modules()
            if isinstance(each, Routing) and each.bias_rate and f"{name}.bias" not in plan.frozen
        ]
        self._chosen: dict[nn.Module, Tensor] = {}
        for routing in self._routings:
            routing.register_forward_hook(self._count)
        self.trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.optimizer = reference_optimizer(self.trained, config.optimizer, plan)
        leverage = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.averages = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        limit = 0.0 if clip_fraction else config.optimizer.clip_grad_norm
        self.trace = Trace(initial=self._weights(), leverage=leverage, limit=limit)

    def step(self, batch: Any, step: int, updates: bool = True, evaluates: bool = False) -> None:
        """Make a step on the global batch; its number, from 0, determines dropout masks and learning rate.

        Without `updates`, weights and buffers stay. With `evaluates`, evaluate the batch before the update.
        """
        trace, before = self.trace, self._buffers()
        self.model.zero_grad()
        mean = reference_loss(self.model, self.plan, batch, step, self.config, self.loss)
        mean.backward()
        for parameter in self.trained.values():
            if parameter.grad is None:  # unused by the loss: zero, as in the engine's cleared buffers
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: gradient_of(parameter).clone() for name, parameter in self.trained.items()}
        if evaluates:
            trace.evaluations[len(trace.losses)] = self._evaluate(batch)
        trace.losses.append(mean.item())
        trace.reported.append({RATE: learning_rate(step + 1, self.config.optimizer), **_counts(batch)})
        trace.gradients.append(gradients)
        trace.norms.append(torch.nn.utils.get_total_norm(list(gradients.values())).item())
        trace.updates.append((trace.updates[-1] if trace.updates else 0) + updates)
        if updates:
            self._update(step)
        else:
            trace.coefficients.append(1.0)
            self._put_back(before)
        trace.weights.append(self._weights())
        if self.config.optimizer.ema_decay is not None:
            trace.averages.append({name: average.clone() for name, average in self.averages.items()})
        persistent = (
            (f"{prefix}.{name}" if prefix else name, buffer)
            for prefix, module in self.model.named_modules()
            for name, buffer in persistent_buffers(module)
        )
        trace.buffers.append({self.plan.whole_name(name): buffer.clone() for name, buffer in persistent})

    @torch.no_grad()
    def _evaluate(self, batch: Any) -> float:
        before, modes = self._buffers(), [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        loss = reference_loss(self.model, self.plan, batch, None, self.config, self.loss).item()
        for module, mode in modes:
            module.training = mode
        self._put_back(before)
        return loss

    def _count(self, routing: nn.Module, given: tuple[Tensor, SampleInfo], choice: Choice) -> None:
        """Note how many tokens with a label that counts chose each expert."""
        if torch.is_grad_enabled():
            _, samples = given
            kept = choice.experts if samples.weights is None else choice.experts[samples.weights > 0]
            self._chosen[routing] = kept.flatten().bincount(minlength=cast(Routing, routing).experts)

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter under the name that it is stored under, in the model's order."""
        return ((self.plan.whole_name(name), parameter) for name, parameter in self.model.named_parameters())

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    @torch.no_grad()
    def _put_back(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])

    def _update(self, step: int) -> None:
        trace, trained = self.trace, self.trained
        if not trace.limit and self.clip_fraction and self.config.optimizer.clip_grad_norm:
            trace.limit = trace.norms[-1] * self.clip_fraction
        torch.nn.utils.clip_grad_norm_(trained.values(), trace.limit or float("inf"))
        clipped = torch.nn.utils.get_total_norm(list(map(gradient_of, trained.values()))).item()
        trace.coefficients.append(clipped / trace.norms[-1] if trace.norms[-1] else 1.0)
        lr = learning_rate(step + 1, self.config.optimizer)
        self.optimizer.step(lr)
        for routing in self._routings:
            counts = self._chosen[routing].double()
            assert routing.bias is not None
            routing.bias += routing.bias_rate * (counts.mean() - counts).sign().to(routing.bias.dtype)
        for name in trained:
            trace.leverage[name] += lr * self.optimizer.leverage(name)
        if self.config.optimizer.ema_decay is not None:
            self._average(step + 1)

    @torch.no_grad()
    def _average(self, update: int) -> None:
        settings = self.config.optimizer
        after, decay = update - settings.ema_start, settings.ema_decay
        if after > 0 and after % settings.ema_every:
            return
        if after <= 0:
            decay = 0.0
        elif settings.ema_warmup:
            count = after / settings.ema_every
            decay = min(decay, (1 + count) / (10 + count))
        for name, parameter in self.trained.items():
            self.averages[name] = decay * self.averages[name] + (1 - decay) * parameter


def one_process(
    make_model: Callable[[], nn.Module],
    plan: ModelPlan,
    config: Config,
    rows: BatchSource,
    steps: int,
    loss: LossFunction | None = None,
    clip_fraction: float | None = None,
) -> Trace:
    """Train for `steps` steps on one device, on the global batches of `rows`; other arguments as for `OneProcess`."""
    run = OneProcess(make_model, plan, config, loss, clip_fraction)
    evaluated = min(1, steps - 1)  # with later steps, which would show any side effect
    for step in range(steps):
        run.step(rows.batch(config, step), step, evaluates=step == evaluated)
    return run.trace


def reference_loss(
    model: nn.Module,
    plan: ModelPlan,
    batch: Any,
    step: int | None,
    config: Config,
    loss: LossFunction | None,
    by_layers: bool = False,
) -> Tensor:
    """Return the mean loss of a global batch, in one pass of the plain model; other arguments as for `one_process`.

    Nothing is dropped if `step` is None. `by_layers` calls the layers one by one, as training does, even if the model
    has a `forward`.
    """
    seed = config.train.seed
    if loss is None:
        keys = None if step is None else sample_keys(seed, step, batch.rows)
        preference = config.preference
        return mean_of_pairs(model, batch, keys, preference) if preference.beta else mean_of_tokens(model, batch, keys)
    if isinstance(batch, Batch):
        batch = (batch.tokens, batch.labels)
    size = batch_size(batch)
    samples = NOTHING if step is None else SampleInfo(sample_keys(seed, step, torch.arange(size)))
    return mean_of_custom(model, plan, batch, samples, DTYPES[config.precision.dtype], loss, by_layers)


def mean_of_tokens(model: nn.Module, batch: Batch, keys: Tensor | None) -> Tensor:
    """Return the mean loss over a batch's valid tokens, which the model computes; without `keys`, as in evaluation."""
    counted = batch.labels != IGNORE_INDEX
    weights = None if keys is None else counted.double() / counted.sum()
    samples = SampleInfo(keys, batch.documents, weights, batch.positions)
    mean: Tensor = model(batch.tokens, batch.labels, samples) / counted.sum()
    return mean


def mean_of_pairs(model: nn.Module, batch: Batch, keys: Tensor | None, settings: PreferenceConfig) -> Tensor:
    """Return the mean loss over a batch's pairs of documents that have labels; `keys` as for `mean_of_tokens`."""
    assert batch.documents is not None
    assert batch.references is not None
    has_label = batch.labels != IGNORE_INDEX
    weights = None if keys is None else has_label.double() / has_label.sum()
    logits = model(batch.tokens, None, SampleInfo(keys, batch.documents, weights, batch.positions))
    labels = batch.labels.masked_fill(~has_label, 0).unsqueeze(-1)
    of_tokens = logits.log_softmax(-1).gather(-1, labels).squeeze(-1) * has_label
    ratios, means = [], []
    for side in (0, 1):
        here = batch.documents == side
        ratios.append((of_tokens * here).sum(1) - batch.references[:, side])
        means.append(ratios[-1] / (has_label & here).sum(1).clamp(min=1))
    if settings.loss == "ipo":
        losses = (means[0] - means[1] - 1 / (2 * settings.beta)).square()
    else:
        difference, smoothing = settings.beta * (ratios[0] - ratios[1]), settings.label_smoothing
        losses = -difference.sigmoid().log() * (1 - smoothing) - (-difference).sigmoid().log() * smoothing
    counted = has_label.any(1)
    mean: Tensor = (losses * counted).sum() / counted.sum()
    return mean


def mean_of_custom(
    model: nn.Module,
    plan: ModelPlan,
    batch: Any,
    samples: SampleInfo,
    dtype: torch.dtype,
    loss: LossFunction,
    by_layers: bool = False,
) -> Tensor:
    """Return the mean of a custom loss over a batch; `by_layers` is as for `reference_loss`."""
    if has_forward(model) and not by_layers:
        whole = LayerSignature.of("the model", model)
        output = forward_layer(model, whole, whole.inputs_of(batch, dtype), samples)
    else:
        output = None
        for place, name in enumerate(plan.layers):
            signature = LayerSignature.of(name, model.get_submodule(name))
            inputs = inputs_from(output, plan.layers[place - 1]) if place else signature.inputs_of(batch, dtype)
            output = forward_layer(model.get_submodule(name), signature, inputs, samples)
    size = batch_size(batch)
    return TermSums(loss, count_terms(loss, batch, size))(output, batch, size)


def write_trace(source: ModelSource, config: Config, rows: BatchSource, steps: int, folder: str) -> list[float]:
    """Train in one process with an active clip, write the trace to `folder`, and return the losses."""
    make_model, plan = source.load(config)
    with explaining_passes(()) if plan.constructed else nullcontext():
        trace = one_process(make_model, plan, config, rows, steps, source.loss(config), CLIP_SHARE)
    trace.save(Path(folder))
    return trace.losses


def convert_floats_(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's floats in place, except expert biases.

    Unlike `Module.to`, complex buffers keep their imaginary part.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_floating_point() and not isinstance(module, Routing):
                setattr(module, name, buffer.to(dtype))


def _counts(batch: Any) -> dict[str, float]:
    """Return the numbers of samples and tokens that a run logs of a global batch."""
    if not isinstance(batch, Batch):
        samples = batch_size(batch)
        return {TOKENS: samples, READ: samples, SAMPLES: samples}
    padding = 0 if batch.padding is None else int(batch.padding.sum())
    valid = int((batch.labels != IGNORE_INDEX).sum())
    return {TOKENS: valid, READ: batch.labels.numel() - padding, SAMPLES: len(batch.labels)}
