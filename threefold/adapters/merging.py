"""Adapters of a whole model by the weights that they belong to, and merged weights W + s · B·A."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from threefold.adapters.layers import Adapter, dense_delta
from threefold.config import Config
from threefold.models.sharding import LORA_A, LORA_B, MAGNITUDE, TABLE_A, TABLE_B
from threefold.models.source import ConfigSource


class Factors(NamedTuple):
    """Adapter of a weight, with the names of its factors; of a table that is looked up, the product is transposed.

    With magnitudes (DoRA), `magnitude` is the name of their changes.
    """

    adapter: Adapter
    a: str
    b: str
    is_table: bool = False
    magnitude: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its weights, in the order of the arguments of `merged`."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> Tensor:
        """Return W + s · B·A, in fp32 at least, its rows scaled to their magnitudes."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight, a, b = (each.to(wide) for each in (weight, a, b))
        change = dense_delta(self.adapter, a, b)
        merged = weight + (change.mT if self.is_table else change)
        return merged if magnitude is None else merged * self.adapter.scale(weight, a, b, magnitude).unsqueeze(-1)


def factors_of(config: Config) -> dict[str, Factors]:
    """Return the adapters of a resolved config's model by the names of their weights; empty without adapters."""
    if not config.adapter.rank:
        return {}
    make_model, _ = ConfigSource().load(config)
    with torch.device("meta"):
        model = make_model()
    return {weight: factors for name, module in model.named_modules() for weight, factors in _of(name, module)}


def _of(name: str, module: nn.Module) -> list[tuple[str, Factors]]:
    own = vars(module)
    if "adapters" in own:  # experts
        return [
            (f"{name}.{each}", Factors(adapter, f"{name}.{each}_{LORA_A}", f"{name}.{each}_{LORA_B}"))
            for each, adapter in own["adapters"].items()
        ]
    if "adapter" not in own:
        return []
    is_table = hasattr(module, TABLE_A)
    a, b = (TABLE_A, TABLE_B) if is_table else (LORA_A, LORA_B)
    magnitude = f"{name}.{MAGNITUDE}" if hasattr(module, MAGNITUDE) else None
    return [(f"{name}.weight", Factors(own["adapter"], f"{name}.{a}", f"{name}.{b}", is_table, magnitude))]
