"""A pipeline stage: consecutive layers of the model, under their names in the whole model."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.sharding import ModelPlan
from threefold.parallel.parameter import stored


class Stage(nn.Module):
    """The layers `first` up to, not including, `end` of a model.

    Parameters keep their names: `named_parameters` of all stages together is that of the model, but that a tied weight
    also appears on the stage of its second use, under its second name (`whole_parameters` gives the one name).

    Args:
        model: the whole model, on the meta device or materialised.
        plan: its layers, in order.
        first, end: which of them.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, first: int, end: int) -> None:
        super().__init__()
        # Names that no layer of a model is likely to have, since layers are attributes of the same module.
        self.model_plan = plan
        self.layer_names: tuple[str, ...] = plan.layers[first:end]
        self.gives_loss = end == len(plan.layers)
        for name in plan.layers[first:end]:
            _place(self, name, model.get_submodule(name))

    def forward(self, x: Tensor, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Tensor:
        """Run the stage's layers.

        Args:
            x: tokens int64 [B, S] on the first stage, activations [B, S, H] on the others.
            labels: int64 [B, S], used by the last stage.
            samples: their dropout keys and documents.

        Returns:
            activations [B, S, H]; on the last stage the summed loss, or where `labels` is None this tensor rank's
            columns of the logits.
        """
        layers = [self.get_submodule(name) for name in self.layer_names]
        for layer in layers[:-1]:
            x = layer(x, samples)
        return layers[-1](x, labels) if self.gives_loss else layers[-1](x, samples)


def whole_parameters(stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Each distinct parameter of a rank's stages with the one name that it has in the whole model."""
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
