"""A pipeline stage of a model, the samples that pass through it, and its tied weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.models.custom_batch import (
    LayerInputs,
    LayerSignature,
    batch_shapes,
    batch_size,
    forward_layer,
    inputs_from,
    map_tensors,
    split_batch,
)
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.loss_terms import TermSums
from threefold.models.sharding import ModelPlan
from threefold.ops.arithmetic import PLAIN_PASS, PassContext
from threefold.parallel.leaf import stored
from threefold.parallel.pipeline.partition import StageMap, covers, shared_between


class Stage(nn.Module):
    """Layers `first` to `end` (exclusive) of a model, on the meta device or materialised.

    Parameters keep their names in the model. A tied weight also appears on the stage of its second use, under its
    second name; `whole_parameters` yields its one name. `passes` surrounds its forward passes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ModelPlan,
        first: int,
        end: int,
        passes: PassContext = PLAIN_PASS,
    ) -> None:
        super().__init__()
        self._passes = passes
        # Names that no layer is likely to have, since layers become attributes of the same module.
        self.model_plan = plan
        self.layer_names: tuple[str, ...] = plan.layers[first:end]
        self.gives_loss = end == len(plan.layers)
        # Of the single-device layers: their parallel replacements are called in the same way.
        self.layer_signatures = {name: LayerSignature.of(name, model.get_submodule(name)) for name in self.layer_names}
        self._alone = {name for name, each in self.layer_signatures.items() if each.takes_one_tensor}
        for name in self.layer_names:
            around, _, last = name.rpartition(".")
            parent: nn.Module = self
            for part in around.split(".") if around else ():
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, model.get_submodule(name))

    def forward(self, x: Tensor | LayerInputs, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Any:
        """Run the stage's layers.

        From tokens int64 [B, S] on the first stage, activations [B, S, H] on the others, and labels int64 [B, S], it
        computes activations; on the last stage the summed loss, or without labels this tensor rank's columns of the
        logits. From `LayerInputs`, for a model whose loss is not in its last layer, it computes the output of the
        stage's last layer.
        """
        with self._passes():
            out = self._run(x, labels, samples)
        self._passes.ended(id(self), out)
        return out

    def loss_of(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a user's loss in the arithmetic of the stage's passes."""
        with self._passes():
            loss = compute()
        self._passes.ended(-id(self), loss)
        return loss

    def _run(self, x: Tensor | LayerInputs, labels: Tensor | None, samples: SampleInfo) -> Any:
        if isinstance(x, LayerInputs):
            output: Any = None
            for place, name in enumerate(self.layer_names):
                inputs = inputs_from(output, self.layer_names[place - 1]) if place else x
                output = self.call(name, inputs, samples)
            return output
        layers = [self.get_submodule(name) for name in self.layer_names]
        for name, layer in zip(self.layer_names[:-1], layers, strict=False):
            x = self._activations(name, layer, x, samples)
        if self.gives_loss:
            last = self.layer_signatures[self.layer_names[-1]]
            return layers[-1](x, labels, **({"samples": samples} if last.takes_samples else {}))
        return self._activations(self.layer_names[-1], layers[-1], x, samples)

    def _activations(self, name: str, layer: nn.Module, x: Any, samples: SampleInfo) -> Any:
        return layer(x) if name in self._alone else layer(x, samples)

    def call(self, layer: str, inputs: LayerInputs, samples: SampleInfo = NOTHING) -> Any:
        """Run one layer, with `samples` if its `forward` has a parameter of that name."""
        return forward_layer(self.get_submodule(layer), self.layer_signatures[layer], inputs, samples)


def whole_parameters(stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each distinct parameter of a rank's stages with its one name in the whole model."""
    seen: set[str] = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if (whole := stage.model_plan.whole_name(name)) not in seen:
                seen.add(whole)
                yield whole, stored(parameter)


class TiedWeights:
    """Tied weights (such as tied embeddings) of this rank's stages that another rank uses too.

    Uses on one rank share a copy, whose gradient autograd accumulates; gradients of several ranks are all-reduced here.
    The constructor is collective over the world, even for ranks whose stages share nothing.
    """

    def __init__(self, plan: ModelPlan, stages: StageMap, mesh: Mesh) -> None:
        self._names: dict[str, list[str]] = {}
        self._axes: dict[str, Axis] = {}
        # This rank's axis of the ranks at some indices of pp; None if it is not among them.
        made: dict[tuple[int, ...], Axis | None] = {
            tuple(range(mesh.pp.size)): replace(mesh.pp, name="tie", device_mesh=None)
        }
        layout = mesh.layout
        places = list(product(range(layout.dp), range(layout.cp), range(layout.tp)))
        for owner, ranks in shared_between(plan, stages).items():
            if ranks not in made:
                groups = [[layout.rank_of(dp, pp, cp, tp) for pp in ranks] for dp, cp, tp in places]
                made[ranks] = mesh.new_axis("tie", groups)
            if (axis := made[ranks]) is not None:
                self._axes[owner] = axis

    def __contains__(self, name: str) -> bool:
        return self._axis_of(name) is not None

    def is_primary(self, name: str) -> bool:
        """Return whether this rank's copy of the parameter `name` is in the global norm."""
        axis = self._axis_of(name)
        return axis is None or axis.is_first

    def sum_(self, gradients: Mapping[str, Tensor], in_order: bool = False) -> None:
        """Replace each shared weight's gradient by the sum over its uses, bit-equal on every rank that holds it.

        `gradients` are by the one name of each parameter; for `in_order`, see `Axis.all_reduce_together_`.
        """
        for owner, axis in self._axes.items():
            # In the same order on every rank, whatever stages it holds.
            if owner not in self._names:
                self._names[owner] = [name for name in sorted(gradients) if covers(owner, name)]
            mine = [gradients[name] for name in self._names[owner]]
            axis.all_reduce_together_(mine, in_order)

    def _axis_of(self, name: str) -> Axis | None:
        return next((axis for owner, axis in self._axes.items() if covers(owner, name)), None)


class StepSamples(ABC):
    """Samples of one step on a rank, or a micro-batch of them."""

    @abstractmethod
    def split(self, parts: int) -> "Sequence[StepSamples]":
        """Split into micro-batches of equal size; raise a `ValueError` or `UserError` if that is impossible."""

    @abstractmethod
    def through(self, stage: Stage, received: tuple[Tensor, ...] | None = None) -> Any:
        """Run a stage on received activations (None on the first); return its own, or the loss on the last stage."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def shapes(self) -> Hashable:
        """Key of the samples' shapes, which decide those of the activations."""


@dataclass(frozen=True)
class LocalBatch(StepSamples):
    """Tokens and labels int64 [B, S] of a rank's replica, at the rank's positions of each sequence.

    Without labels, the last layer returns this tensor rank's columns of the logits.
    """

    tokens: Tensor
    labels: Tensor | None
    samples: SampleInfo = NOTHING

    def split(self, parts: int) -> list["LocalBatch"]:
        if len(self.tokens) % parts:
            raise ValueError(f"{len(self.tokens)} samples do not divide into {parts} micro-batches")
        labels, *facts = (
            [None] * parts if each is None else each.chunk(parts) for each in (self.labels, *self.samples)
        )
        samples = [SampleInfo(*each) for each in zip(*facts, strict=True)]
        micro_batches = zip(self.tokens.chunk(parts), labels, samples, strict=True)
        return [LocalBatch(*each) for each in micro_batches]

    def through(self, stage: Stage, received: tuple[Tensor, ...] | None = None) -> Any:
        return stage(self.tokens if received is None else received[0], self.labels, self.samples)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def shapes(self) -> Hashable:
        return tuple(self.tokens.shape)


@dataclass(frozen=True)
class CustomBatch(StepSamples):
    """Batch of a user's own model (tensors in any nesting), whose loss is a function of the last layer's output.

    Without a loss, the result is that output. `outputs` collects it by the number of the micro-batch, if not None.
    """

    data: Any
    loss: TermSums | None
    dtype: torch.dtype
    samples: SampleInfo = NOTHING
    outputs: dict[int, Any] | None = None
    number: int = 0

    def split(self, parts: int) -> list["CustomBatch"]:
        data, keys = split_batch(self.data, parts), self.samples.keys
        samples = [NOTHING] * parts if keys is None else [SampleInfo(each) for each in keys.chunk(parts)]
        return [
            replace(self, data=part, samples=of_part, number=number)
            for number, (part, of_part) in enumerate(zip(data, samples, strict=True))
        ]

    def through(self, stage: Stage, received: tuple[Tensor, ...] | None = None) -> Any:
        first = stage.layer_signatures[stage.layer_names[0]]
        inputs = first.inputs_of(self.data, self.dtype) if received is None else LayerInputs(received, {})
        output = stage(inputs, None, self.samples)
        loss = self.loss
        if loss is None or not stage.gives_loss:
            return output
        if self.outputs is not None:
            self.outputs[self.number] = map_tensors(output, Tensor.detach, "The output of the last layer")
        return stage.loss_of(lambda: loss(output, self.data, batch_size(self.data)))

    @property
    def size(self) -> int:
        return batch_size(self.data)

    @property
    def shapes(self) -> Hashable:
        return batch_shapes(self.data)
