"""Check of a model in a custom training loop: its first step computes in its layout what one process computes."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from threefold.checkpoint.folder import from_first
from threefold.errors import UserError
from threefold.models.layers.decoder import SampleInfo
from threefold.models.loss_terms import LossFunction
from threefold.models.own_batch import batch_shapes, batch_size, joined, tensors_of
from threefold.models.source import construct
from threefold.parallel.parameter import whole
from threefold.parallel.whole_state import whole_state
from threefold.random.dropout import sample_keys
from threefold.random.rng import draws_in_sequence, generators_preserved
from threefold.torch_private.fake import FakeTensor
from threefold.train.step import GradientStep
from threefold.verify.reference import convert_floats_, mean_of_own
from threefold.verify.self_check import MOST_PARAMETERS, MOST_WORK, TOLERANCE, find_hidden_state

_ADVICE = "or give parallelize verify=False to train all the same"


@dataclass(frozen=True)
class LoopCheck:
    """State of a model before its first step, and the global batch of that step.

    Made by `begin`; `finish` compares the step with one process.
    """

    step: GradientStep
    make_model: Callable[[], nn.Module]
    loss: LossFunction
    state: dict[str, Tensor]
    batch: Any
    number: int

    @classmethod
    def begin(
        cls, step: GradientStep, make_model: Callable[[], nn.Module], batch: Any, loss: LossFunction | None, number: int
    ) -> "LoopCheck | None":
        """Return the check of a step, from 0; None if there is nothing to check or it takes long. Collective."""
        settings, mesh = step.settings, step.mesh
        is_split = mesh.world.size > 1 or settings.micro_batches > 1
        comparable = settings.dtype in (torch.float32, torch.float64) and settings.gradient_compression == "none"
        if loss is None or not (step.plan.constructed and is_split and comparable) or mesh.device.type != "cpu":
            return None
        if any(isinstance(each, FakeTensor) for each in tensors_of(batch)):
            return None
        shapes = batch_shapes(batch)
        positions = max(prod(shape[:-1] if dtype.is_floating_point else shape) for _, shape, dtype in shapes)
        draws = any(draws_in_sequence(module) for stage in step.stages for module in stage.modules())
        held = sum(weight.parameter.numel() for weight in step.model.weights)
        facts = mesh.world.gather_objects((held, positions, draws))
        parameters = max(each for each, _, _ in facts) * mesh.pp.size
        work = parameters * max(each for _, each, _ in facts) * mesh.dp.size
        if any(each for _, _, each in facts) or parameters > MOST_PARAMETERS or work > MOST_WORK:
            return None
        whole_batch = joined(mesh.dp.gather_objects(batch))
        return cls(step, make_model, loss, whole_state(step.model), whole_batch, number)

    def finish(self, loss: float) -> None:
        """Compare the step, whose loss was `loss`, with one process. Collective over the world.

        Raises:
            UserError: on every rank, if the results differ, or the model keeps state or draws numbers that a layout
                changes.
        """
        step = self.step
        own = {
            weight.name: whole(weight.stored(step.gradients[weight.leaf].detach()))
            for weight in step.model.weights
            if weight.is_trained
        }
        gradients = {name: each for held in step.mesh.pp.gather_objects(own) for name, each in held.items()}
        if problem := from_first(step.mesh.world, lambda: self._problem(loss, gradients)):
            raise UserError(problem)

    def _problem(self, loss: float, gradients: dict[str, Tensor]) -> str:
        """Return how the step differs from one process; empty if it does not, or if one process does not run it."""
        settings, plan = self.step.settings, self.step.plan
        keys = sample_keys(settings.seed, self.number, torch.arange(batch_size(self.batch)))
        of_batch = partial(
            mean_of_own, plan=plan, batch=self.batch, samples=SampleInfo(keys), dtype=settings.dtype, loss=self.loss
        )
        with generators_preserved(), suppress(Exception):
            model = self._made()
            found = find_hidden_state(model, self._made, of_batch)
            if found.refusal:
                return f"{found.refusal}; {_ADVICE}."
            if found.drawing:
                return (
                    f"{found.drawing}, whose numbers depend on the layout, its micro-batches and recomputation; use "
                    "threefold.Dropout with samples.keys, samples being a parameter of the layer's forward; "
                    f"{_ADVICE}."
                )
            mean = of_batch(model)
            mean.backward()
            return self._departure(model, mean.item(), loss, gradients)
        return ""

    def _made(self) -> nn.Module:
        """Return the unsplit model with the weights and buffers from before the step."""
        model = construct(self.make_model, self.step.settings.seed)
        convert_floats_(model, self.step.settings.dtype)
        model.load_state_dict(self.state)
        return model

    def _departure(self, model: nn.Module, expected: float, loss: float, gradients: dict[str, Tensor]) -> str:
        wanted = {
            self.step.plan.whole_name(name): torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        largest = max(float(each.abs().max()) for each in wanted.values())
        errors = {"the loss": abs(loss - expected) / max(abs(expected), 1e-12)}
        for name, each in wanted.items():
            # Gradients that are rounding alone, such as those of a bias of keys, are compared with the largest.
            size = max(float(each.abs().max()), 1e-6 * largest, 1e-30)
            errors[f"the gradient of {name!r}"] = float((gradients[name] - each).abs().max()) / size
        first = next((name for name, error in errors.items() if not error <= TOLERANCE), None)
        if first is None:
            return ""
        return (
            f"{type(model).__name__} does not compute in {self.step.mesh.layout} what it computes in one process: the "
            f"first departure is in {first}, by a relative error of {errors[first]:.1e}; have each layer compute every "
            f"sample by itself, from its inputs, parameters and buffers, {_ADVICE}."
        )
