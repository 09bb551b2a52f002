"""A few small weights, their gradients, and torch's optimizers stepping with them."""

import torch
from torch import Tensor

SHAPES = {"matrix": (6, 4), "wide": (3, 8), "table": (5, 4), "bias": (4,)}
HIDDEN = ("matrix", "wide")
STEPS = 6


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def train_torch(parameters: dict[str, Tensor], *optimizers: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        for name, gradient in weights(100 + step).items():
            parameters[name].grad = gradient
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            optimizer.step()
