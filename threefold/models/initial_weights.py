"""What the weights of the models start from."""

from fnmatch import fnmatchcase

from threefold.config import ModelConfig
from threefold.parallel.split import Constant, Initial, Normal

_RESIDUAL = ("*.attn.proj.weight", "*.mlp.down.weight", "*.mlp.shared.down.weight", "*.mlp.experts.down")
"""Weights whose output joins the residual stream."""


def initial_values(name: str, config: ModelConfig) -> Initial:
    """GPT-2's: N(0, range²), narrower by 1/√(2·layers) where a layer's output joins the residual stream; biases 0, and
    the weights of norms 1."""
    if name.endswith(".bias"):
        return Constant(0.0)
    if fnmatchcase(name, "*norm.weight"):
        return Constant(1.0)
    joins_residual = any(fnmatchcase(name, pattern) for pattern in _RESIDUAL)
    return Normal(config.initializer_range * ((2 * config.num_layers) ** -0.5 if joins_residual else 1.0))
