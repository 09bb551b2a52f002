"""Models whose constructor freezes some of their parameters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from tests.support.own_models import OwnCase, own_case
from threefold.models.sharding import matches

FROZEN = {
    "first layers": ("start.**", "blocks.0.**", "blocks.1.**"),
    "last layers": ("blocks.3.**", "end.**"),
    "some of each": ("start.offset", "blocks.*.up.weight", "blocks.1.down.bias", "blocks.*.gain", "end.norm.*"),
    "all but one": ("start.**", "blocks.**", "end.scores.weight"),
}
"""Names of frozen parameters, by a readable description."""


def _freezing(make: Callable[[], nn.Module], patterns: Sequence[str]) -> nn.Module:
    """Make a model with some parameters frozen, as a user's constructor may leave them."""
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(matches(name, pattern) for pattern in patterns))
    return model


def frozen_case(which: str, **layout: object) -> OwnCase:
    own = own_case("masked", blocks=4, **layout)
    make = partial(_freezing, own.make, FROZEN[which])
    frozen = frozenset(name for name, parameter in make().named_parameters() if not parameter.requires_grad)
    assert frozen
    return replace(own, make=make, plan=replace(own.plan, frozen=frozen))
