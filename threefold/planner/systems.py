"""Training systems, described by the few features that decide the physical work of a step.

An estimate for a GPU assumes the kernels and overlap that are usual on it, because published steps were measured with
them; the system `own` has the built-in kernels. A system only switches work on and off: no rate and no fraction
depends on it.
"""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import one_of


@dataclass(frozen=True)
class System:
    """Features of a training system that decide how it computes a step.

    Attributes:
        flash: whether attention is one fused kernel; otherwise its weights go through memory.
        tuned_attention: whether the fused kernel is tuned for the GPU (cuDNN, FlashAttention-3) rather than general.
        drops_in_flash: whether the fused kernel supports dropout.
        fused: whether bias, activation, dropout and residual sum, and rotary embedding, are one kernel each.
        fused_norm, fused_norm_recomputed: whether a norm is one kernel, and stays one in fully recomputed blocks.
        fused_loss: whether softmax and cross-entropy are one kernel over the logits in each direction.
        fused_gradients: whether weight-gradient products accumulate directly into the fp32 gradients.
        gradient_bytes: bytes per element in the data-parallel sum; 0 for the gradients' itemsize.
        overlap_tensor: whether tensor-parallel collectives run in chunks during the neighbouring matrix products.
        overlap_tensor_backward: whether they overlap with weight gradients in the backward pass.
        overlap_context: whether context-parallel collectives overlap with attention.
        overlap_gradients: whether gradient sums overlap with the last backward pass, weight gathers with the first
            forward.
        scatters_sends: whether tensor-parallel ranks each send a part of a stage's output, gathered by the receivers.
        overlap_sends: whether pipeline sends and receives overlap with computation when a rank has several stages.
        sharded_optimizer: whether replicas share the optimizer's work even where `parallel.zero` is 0.
        replays_operations: whether `selective` recompute replays every second product and all work between, not only
            the attention core.
        narrow_gradients: compute dtypes whose gradients are accumulated in that dtype instead of fp32.
        whole_logits: whether every tensor-parallel rank gathers the logits of the whole vocabulary for the loss.
        data_inside_pipeline: whether the rank order is pp × dp × cp × tp instead of dp × pp × cp × tp.
    """

    name: str
    flash: bool = True
    tuned_attention: bool = True
    drops_in_flash: bool = True
    fused: bool = True
    fused_norm: bool = True
    fused_norm_recomputed: bool = True
    fused_loss: bool = False
    fused_gradients: bool = True
    gradient_bytes: int = 0
    overlap_tensor: bool = False
    overlap_tensor_backward: bool = True
    overlap_context: bool = True
    overlap_gradients: bool = True
    scatters_sends: bool = True
    overlap_sends: bool = True
    sharded_optimizer: bool = False
    replays_operations: bool = False
    narrow_gradients: tuple[str, ...] = ()
    whole_logits: bool = False
    data_inside_pipeline: bool = True
    chunked_loss: bool = False
    about: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


def _systems() -> dict[str, System]:
    """Read the systems of the package, each with what differs from the defaults or from the one that it is `like`."""
    given = tomllib.loads(Path(__file__).with_name("systems.toml").read_text(encoding="utf-8"))

    def features(name: str) -> dict[str, Any]:
        row = dict(given[name])
        like = row.pop("like", None)
        changed = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        return {**(features(like) if like else {}), **changed}

    return {name: System(name, **features(name)) for name in given}


SYSTEMS: Final = _systems()
"""Training systems by name."""


def find_system(name: str) -> System:
    if name not in SYSTEMS:
        raise UserError(f"The training system {shown(name)} is unknown; it must be {one_of(name, list(SYSTEMS))}.")
    return SYSTEMS[name]


Attention = Literal["fused", "plain", "exact", "dropped", "dropped again"]
"""Implementation of the attention core: a fused kernel (or tiles recomputed in the backward pass), plain matrix
products, products of an exact run, plain products with dropout, or tiles with dropout that the backward pass
recomputes."""


@dataclass(frozen=True)
class Kernels:
    """Choices of what kernels keep for the backward pass, where training systems and devices differ.

    Attributes:
        fused_norm: whether RMSNorm keeps its input and a number per row; otherwise input and normalised input, in at
            least fp32, and the number.
        fused_gate: whether a gated network keeps only the gates and the values they gate; otherwise SiLU's output too.
        fused_rotary: whether rotated queries and keys replace the unrotated ones; otherwise both are kept.
        fused_softmax: whether unfused attention keeps only its weights before and after dropout and the mask, without
            copies of queries, keys and values (Megatron-LM).
        mask_bytes: bytes per element of a dropout mask; 0 for the activations' itemsize.
        replays_operations: see `System`.
        wide_statistics: whether norms keep their per-row numbers in fp32 whatever dtype they compute in.
        grouped: whether one kernel computes all experts, with one weight gradient; otherwise separate ones are joined.
        keeps_probabilities: whether the loss keeps probabilities in at least fp32; otherwise logits and two numbers per
            token.
        widens_logits: whether the loss widens all logits of the current chunk at once; otherwise a few rows at a time.
        loss_by_columns: whether the loss processes some columns of the logits at a time even if it keeps all of them.
        gradients_in_place: whether weight-gradient products accumulate directly into the fp32 gradients.
    """

    fused_norm: bool = False
    fused_gate: bool = False
    fused_rotary: bool = False
    fused_softmax: bool = False
    mask_bytes: int = 0
    replays_operations: bool = False
    wide_statistics: bool = False
    grouped: bool = False
    keeps_probabilities: bool = False
    widens_logits: bool = False
    loss_by_columns: bool = False
    gradients_in_place: bool = False


FRAGMENTATION: Final = 0.05
"""Memory that a GPU's caching allocator loses between blocks of different sizes, over that of transient tensors."""


@dataclass(frozen=True)
class Keeps:
    """Memory behaviour of a training system on a device: the tensors that its kernels keep for the backward pass, and
    the fraction of transient tensors that its allocator loses.

    With `casts_logits`, separate kernels cast narrow logits to fp32 on a GPU. The allocator's blocks for the narrow
    logits are too small for the wide ones, and stay reserved.
    """

    system: System
    kernels: Kernels = field(default_factory=Kernels)
    casts_logits: bool = False
    fragmentation: float = 0.0

    def attention(self, built_in: Attention) -> Attention:
        """Return how this system computes attention where this package's kernels would compute it as `built_in`."""
        if not self.system.flash:
            return "dropped" if built_in in ("dropped", "dropped again") else "plain"
        return "fused" if self.system.drops_in_flash else built_in


def keeps_of(system: str, device: str) -> Keeps:
    """Return the memory behaviour of a training system on a device, `cpu` or `cuda`; on a CPU that of this package."""
    found = find_system(system)
    if device == "cpu":
        return Keeps(SYSTEMS["own"])
    shared = Kernels(fused_norm=True, wide_statistics=True, grouped=True, widens_logits=True)
    if found.name.startswith("own"):
        return Keeps(found, replace(shared, loss_by_columns=True), fragmentation=FRAGMENTATION)
    kernels = replace(
        shared,
        fused_norm=found.fused_norm,
        fused_gate=found.fused,
        fused_rotary=found.fused,
        fused_softmax=True,
        mask_bytes=1,
        replays_operations=found.replays_operations,
        keeps_probabilities=True,
        gradients_in_place=found.fused_gradients,
    )
    return Keeps(found, kernels, not found.fused_loss, FRAGMENTATION)
