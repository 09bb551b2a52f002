"""µP (Yang et al., arXiv 2203.03466): how initial values and learning rates change with the width of a `Decoder`.

All widths are taken to be in one ratio to those of the base model, `ModelConfig.width`. With the multiplier of the
logits (`Head`), the rules are those of the paper's table 8; the router and the gate of a shared expert, which read the
width and have none, follow its table 3, without a multiplier.
"""

from typing import Literal

from threefold.config import OptimizerConfig

Role = Literal["input", "hidden", "readout", "fixed"]
"""Which dims of a weight grow: those of its output, or of the logits' input (`input`, also for biases, norms and the
tied embedding), both (`hidden`), those of its input (`readout`), or none (`fixed`)."""

_READOUTS = ("mlp.router.weight", "mlp.shared_gate.weight")
_FIXED = ("mlp.router.bias", "attn.q_norm.weight", "attn.k_norm.weight", "attn.core.sinks")


def role_of(name: str) -> Role:
    """Return the role of a weight of a `Decoder`, by its name."""
    if name.endswith(_READOUTS):
        return "readout"
    if name.endswith(_FIXED):
        return "fixed"
    vector = name.endswith(("norm.weight", ".bias", "_bias"))
    return "input" if vector or name.startswith(("embed.", "head.")) else "hidden"


def deviation_factor(role: Role, width: float) -> float:
    """Return the factor on the standard deviation of initial values."""
    return {"hidden": width**-0.5, "readout": 1 / width}.get(role, 1.0)


def rate_factor(optimizer: OptimizerConfig, role: Role, width: float) -> float:
    """Return the factor on the learning rate of a weight, by which its weight decay is divided.

    Adam and Lion move each element by about the learning rate, SGD by the gradient's size, which depends on the width.
    Muon's update has a spectral norm of 1 times `lr_scaling`, which may grow with the width.
    """
    if width == 1:
        return 1.0
    if optimizer.name == "sgd":
        return {"input": width, "readout": 1 / width}.get(role, 1.0)
    if optimizer.name == "muon" and role in ("hidden", "readout"):
        growing = 0.5 if optimizer.lr_scaling == "match_rms_adamw" else 0.0
        return width ** -(growing + (0.5 if role == "readout" else 0.0))
    return 1 / width if role in ("hidden", "readout") else 1.0
