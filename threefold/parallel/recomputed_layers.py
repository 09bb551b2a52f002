"""In which layers of a model activations are computed again. Needs no torch."""

from collections.abc import Mapping, Sequence

from threefold.models.name_pattern import matches


def chosen_layers(layers: Sequence[str], patterns: Mapping[str, Sequence[str]], mode: str, every: int = 1) -> list[str]:
    """The layers of a model in which `mode` recomputes something.

    Args:
        layers: of the whole model, in order.
        patterns: mode → the modules that it recomputes, as in `ModelPlan`.
        mode, every: as in `apply_recompute`.
    """
    if mode == "none":
        return []
    return [layer for layer in layers if any(_is_within(pattern, layer) for pattern in patterns[mode])][::every]


def _is_within(pattern: str, layer: str) -> bool:
    depth = layer.count(".") + 1
    return matches(layer, ".".join(pattern.split(".")[:depth]))
