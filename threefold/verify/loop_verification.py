"""Verification of a model in a custom training loop: its first step computes what one process computes."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.checkpoint.folder import from_first
from threefold.errors import UserError
from threefold.models.custom_batch import batch_size, joined, tensors_of
from threefold.models.layers.decoder import SampleInfo
from threefold.models.loss_terms import LossFunction
from threefold.models.source import construct
from threefold.parallel.parameter import whole
from threefold.parallel.whole_state import whole_state
from threefold.random.dropout import sample_keys
from threefold.random.rng import draws_in_sequence, generators_preserved
from threefold.torch_private.fake import FakeTensor
from threefold.train.callbacks.base import say
from threefold.train.step import GradientStep
from threefold.train.step_batch import is_of_tokens
from threefold.verify.compare import SMALL
from threefold.verify.reference import convert_floats_, mean_of_custom, mean_of_tokens
from threefold.verify.run_verification import (
    DRAWS,
    TOLERANCE,
    find_hidden_state,
    not_run,
    not_verified,
    other_forward,
    positions_of,
    too_large,
)

_ADVICE = "or give parallelize verify=False to train all the same"


@dataclass(frozen=True)
class LoopVerification:
    """State of a model before its first step, and the global batch of that step.

    Made by `begin`; `finish` compares the step with one process.
    """

    step: GradientStep
    make_model: Callable[[], nn.Module]
    loss: LossFunction | None
    state: dict[str, Tensor]
    parts: Sequence[Any]
    number: int
    began: float

    @classmethod
    def begin(
        cls, step: GradientStep, make_model: Callable[[], nn.Module], batch: Any, loss: LossFunction | None, number: int
    ) -> "LoopVerification | None":
        """Return the check of a step, from 0; None if there is nothing to check. Collective over the world.

        One line on the first rank says why a layout is not checked: for a device, a dtype, or a model that one process
        does not run in seconds.
        """
        settings, mesh, began = step.settings, step.mesh, time.monotonic()
        is_split = mesh.world.size > 1 or settings.micro_batches > 1
        if not (step.plan.constructed and is_split):
            return None
        data = (batch.tokens, batch.labels) if is_of_tokens(batch) else batch
        positions, samples = 0, 0
        with suppress(Exception):  # of a batch that the step itself refuses
            if not any(isinstance(each, FakeTensor) for each in tensors_of(data)):
                positions, samples = positions_of(data), batch_size(data)
        draws = any(draws_in_sequence(module) for stage in step.stages for module in stage.modules())
        held = sum(weight.parameter.numel() for weight in step.model.weights)
        facts = mesh.world.gather_objects((held, positions, samples, draws))
        if not all(positions for _, positions, _, _ in facts):
            return None
        parameters, positions, samples = (max(each) for each in list(zip(*facts, strict=True))[:3])
        replicas = mesh.dp.size
        reason = _unlike(step) or too_large(
            parameters * mesh.pp.size, positions * replicas, samples * replicas, any(each[-1] for each in facts)
        )
        if reason:
            if mesh.rank == 0:
                say(not_verified(reason))
            return None
        is_first = mesh.tp.is_first and mesh.pp.is_first and mesh.cp.is_first
        parts = mesh.dp.gather_objects(batch) if is_first else []
        return cls(step, make_model, loss, whole_state(step.model), parts if mesh.rank == 0 else [], number, began)

    def finish(self, loss: float) -> None:
        """Compare the step, whose loss was `loss`, with one process. Collective over the world.

        Raises:
            UserError: on every rank, if the results differ, or the model keeps state or draws numbers that a layout
                changes.
        """
        step = self.step
        local = {
            weight.name: whole(weight.stored(step.gradients[weight.leaf].detach()))
            for weight in step.model.weights
            if weight.is_trained
        }
        gradients = {name: each for held in step.mesh.pp.gather_objects(local) for name, each in held.items()}
        for line in from_first(step.mesh.world, lambda: self._compare(loss, gradients)):
            if step.mesh.rank == 0:
                say(line)

    def _compare(self, loss: float, gradients: dict[str, Tensor]) -> tuple[str, ...]:
        """Compare the step with one process; return lines to print."""
        try:
            with generators_preserved(), self.step.mesh.without_collectives():
                batch = _joined(self.parts)
                problem, lines = self._problem(batch, loss, gradients)
        except Exception as error:  # for example of a loss function that calls collectives
            return (not_verified(not_run(error)),)
        if problem:
            raise UserError(f"{problem}, {_ADVICE}.")
        return lines

    def _problem(self, batch: Any, loss: float, gradients: dict[str, Tensor]) -> tuple[str, tuple[str, ...]]:
        """Return a clause on how the step differs from one process, empty if it does not, and lines to print."""
        plan, seed = self.step.plan, self.step.settings.seed
        of_batch: Callable[..., Tensor]
        if self.loss is None:
            of_batch = partial(mean_of_tokens, batch=batch, keys=sample_keys(seed, self.number, batch.rows))
        else:
            data, rows = ((batch.tokens, batch.labels), batch.rows) if is_of_tokens(batch) else (batch, None)
            keys = sample_keys(seed, self.number, torch.arange(batch_size(data)) if rows is None else rows)
            of_batch = partial(mean_of_custom, plan=plan, batch=data, samples=SampleInfo(keys), loss=self.loss)
            of_batch = partial(of_batch, dtype=self.step.settings.dtype)
        model = self._made()
        found = find_hidden_state(model, self._made, of_batch)
        if found.refusal:
            return found.refusal, ()
        if found.drawing:
            return f"{found.drawing}, {DRAWS}", ()
        if self.loss is not None and (other := other_forward(model, plan, of_batch)):
            return f"{type(model).__name__}: {other}", ()
        mean = of_batch(model)
        mean.backward()
        errors = self._errors(model, mean.item(), loss, gradients)
        layout = str(self.step.mesh.layout)
        if self.step.mesh.world.size == 1:
            layout = f"{self.step.settings.micro_batches} micro-batches"
        if first := next((name for name, error in errors.items() if not error <= TOLERANCE), None):
            return (
                f"{type(model).__name__} does not compute in {layout} what it computes in one process: the first "
                f"departure is in {first}, by a relative error of {errors[first]:.1e}; have each layer compute every "
                "sample by itself, from its inputs, parameters and buffers, and the loss from its arguments"
            ), ()
        samples = sum(batch_size(part.tokens if is_of_tokens(part) else part) for part in self.parts)
        line = f"Verified {layout} against one process: loss and gradients of {samples} samples are equal"
        return "", (*found.notes, f"{line} ({max(errors.values()):.0e}); {time.monotonic() - self.began:.1f} s.")

    def _made(self) -> nn.Module:
        """Return the unsplit model with the weights and buffers from before the step."""
        model = construct(self.make_model, self.step.settings.seed)
        convert_floats_(model, self.step.settings.dtype)
        model.load_state_dict(self.state)
        return model

    def _errors(self, model: nn.Module, expected: float, loss: float, gradients: dict[str, Tensor]) -> dict[str, float]:
        """Return the relative error of the loss and of each gradient, in model order."""
        wanted = {
            self.step.plan.whole_name(name): torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        largest = max((float(each.abs().max()) for each in wanted.values()), default=0.0)
        errors = {"the loss": abs(loss - expected) / max(abs(expected), 1e-12)}
        for name, each in wanted.items():
            # Gradients that are rounding alone, such as those of a bias of keys, are compared with the largest.
            size = max(float(each.abs().max()), SMALL * largest, 1e-30)
            errors[f"the gradient of {name!r}"] = float((gradients[name] - each).abs().max()) / size
        return errors


def _unlike(step: GradientStep) -> str:
    """Return why a step cannot equal one process up to the rounding of its dtype; empty if it can."""
    settings, device = step.settings, step.mesh.device.type
    if device != "cpu":
        return f"the mesh is on {device}"
    if settings.dtype not in (torch.float32, torch.float64):
        return f"the dtype is {settings.dtype}, whose rounding hides a departure"
    if settings.parallel.gradient_compression != "none":
        return f"gradients are summed in {settings.parallel.gradient_compression}, whose rounding hides a departure"
    return ""


def _joined(parts: Sequence[Any]) -> Any:
    """Return the global batch of the replicas' parts."""
    if not is_of_tokens(parts[0]):
        return joined(parts)
    fields = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
    return replace(parts[0], **{name: None if each[0] is None else torch.cat(each) for name, each in fields.items()})
