"""Pipeline stages: consecutive layers of a model, under their names in the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.own_batch import LayerInputs, LayerSignature, forward_layer, inputs_from
from threefold.models.sharding import ModelPlan
from threefold.parallel.parameter import stored
from threefold.parallel.pipeline.partition import StageMap, covers, shared_between


class Stage(nn.Module):
    """Layers `first` to `end` (exclusive) of a model, on the meta device or materialised.

    Parameters keep their names in the model. A tied weight also appears on the stage of its second use, under its
    second name; `whole_parameters` yields its one name.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, first: int, end: int) -> None:
        super().__init__()
        # Names that no layer is likely to have, since layers become attributes of the same module.
        self.model_plan = plan
        self.layer_names: tuple[str, ...] = plan.layers[first:end]
        self.gives_loss = end == len(plan.layers)
        # Of the single-device layers: their parallel replacements are called alike.
        self.layer_signatures = {
            name: LayerSignature.of(name, model.get_submodule(name)) for name in plan.layers[first:end]
        }
        for name in plan.layers[first:end]:
            _place(self, name, model.get_submodule(name))

    def forward(self, x: Tensor | LayerInputs, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Any:
        """Run the stage's layers.

        Args:
            x: tokens int64 [B, S] on the first stage, activations [B, S, H] on the others; or the first layer's inputs,
                for a model whose loss is not in its last layer.
            labels: int64 [B, S], used by the last stage.
            samples: dropout keys and documents of the samples.

        Returns:
            activations [B, S, H]; on the last stage the summed loss, or if `labels` is None this tensor rank's columns
            of the logits. For `LayerInputs`, the last layer's output.
        """
        if isinstance(x, LayerInputs):
            return self._through(x, samples)
        layers = [self.get_submodule(name) for name in self.layer_names]
        for name, layer in zip(self.layer_names[:-1], layers, strict=False):
            x = self._activations(name, layer, x, samples)
        if self.gives_loss:
            return layers[-1](x, labels)
        return self._activations(self.layer_names[-1], layers[-1], x, samples)

    def _activations(self, name: str, layer: nn.Module, x: Any, samples: SampleInfo) -> Any:
        return layer(x) if self.layer_signatures[name].takes_one_tensor else layer(x, samples)

    def _through(self, inputs: LayerInputs, samples: SampleInfo) -> Any:
        output: Any = None
        for place, name in enumerate(self.layer_names):
            if place:
                inputs = inputs_from(output, self.layer_names[place - 1])
            output = self.call(name, inputs, samples)
        return output

    def call(self, layer: str, inputs: LayerInputs, samples: SampleInfo = NOTHING) -> Any:
        """Run one layer, with `samples` if its `forward` has a parameter of that name."""
        return forward_layer(self.get_submodule(layer), self.layer_signatures[layer], inputs, samples)


def whole_parameters(stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each distinct parameter of a rank's stages with its one name in the whole model."""
    seen: set[nn.Parameter] = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield stage.model_plan.whole_name(name), stored(parameter)


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(leaf, module)


class TiedWeights:
    """Tied weights (such as tied embeddings) of this rank's stages that another rank uses too.

    Uses on one rank share a copy, whose gradient autograd accumulates; gradients of several ranks are all-reduced here.
    The constructor is collective over the world, also for ranks whose stages share nothing.
    """

    def __init__(self, plan: ModelPlan, stages: StageMap, mesh: Mesh) -> None:
        self._axes: dict[str, Axis] = {}
        made: dict[tuple[int, ...], Axis | None] = {}
        for owner, ranks in shared_between(plan, stages).items():
            if ranks not in made:
                made[ranks] = _axis(ranks, mesh)
            axis = made[ranks]
            if axis is not None:
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
            # In one order on every rank, whatever stages it holds.
            mine = [gradients[name] for name in sorted(gradients) if covers(owner, name)]
            axis.all_reduce_together_(mine, in_order)

    def _axis_of(self, name: str) -> Axis | None:
        return next((axis for owner, axis in self._axes.items() if covers(owner, name)), None)


def _axis(ranks: tuple[int, ...], mesh: Mesh) -> Axis | None:
    """Return the indices `ranks` of this rank's pp axis as an axis; None if this rank is not among them."""
    if ranks == tuple(range(mesh.pp.size)):
        return replace(mesh.pp, name="tie", device_mesh=None)
    return mesh.new_axis("tie", _groups(ranks, mesh.layout))


def _groups(ranks: Sequence[int], layout: Layout) -> list[list[int]]:
    places = product(range(layout.dp), range(layout.cp), range(layout.tp))
    return [[layout.rank_of(dp=dp, pp=pp, cp=cp, tp=tp) for pp in ranks] for dp, cp, tp in places]
