"""What training systems keep in memory where they differ, by the features that the cost model knows them by."""

from dataclasses import dataclass, field
from typing import Final

from threefold.plan.activations import Attention, Kernels
from threefold.plan.cost.system import find_system

_NARROW: Final = 2
FRAGMENTATION: Final = 0.05
"""What the caching allocator of a GPU loses between blocks of different sizes, as a share of the tensors that come and
go."""


@dataclass(frozen=True)
class Keeps:
    """What a system keeps on a device.

    Attributes:
        kernels: what its kernels keep.
        flash: whether attention is fused.
        drops_in_flash: whether fused attention has dropout, and masks of documents.
        chunked_loss: whether `train.loss_chunk_size` is followed.
        shards_optimizer: whether replicas share masters and optimizer state even where `parallel.zero` is 0.
        narrow_gradients: dtypes of the computation in which gradients are added up themselves.
        whole_logits: whether every tensor rank gathers all logits for the loss.
        casts_logits: whether the loss casts narrow logits to fp32 in kernels of their own, on a GPU: what the allocator
            took for the narrow ones is too small for the wide ones, and stays with it.
        fragmentation: what the allocator loses, as a share of what comes and goes.
    """

    kernels: Kernels = field(default_factory=Kernels)
    flash: bool = True
    drops_in_flash: bool = False
    chunked_loss: bool = True
    shards_optimizer: bool = False
    narrow_gradients: tuple[str, ...] = ()
    whole_logits: bool = False
    casts_logits: bool = False
    fragmentation: float = 0.0

    def attention(self, own: Attention) -> Attention:
        """How attention computes, where this package's kernels for the device would compute as `own` says."""
        if not self.flash:
            return "dropped" if own in ("dropped", "dropped again") else "plain"
        return "fused" if self.drops_in_flash else own


def keeps_of(system: str, device: str) -> Keeps:
    """What a training system keeps.

    Args:
        system: its name, as `plan.cost.system` knows it.
        device: `cpu` or `cuda`.

    Raises:
        UserError: there is no such system.
    """
    found = find_system(system)
    if device == "cpu":
        return Keeps()
    if found.name.startswith("own"):
        kernels = Kernels(fused_norm=True, wide_statistics=True, grouped=True, widens_logits=True)
        return Keeps(kernels, fragmentation=FRAGMENTATION)
    kernels = Kernels(
        fused_norm=found.fused_norm,
        fused_gate=found.fused,
        fused_rotary=found.fused,
        fused_softmax=True,
        mask_bytes=1,
        replays_operations=found.replays_operations,
        wide_statistics=True,
        grouped=True,
        keeps_probabilities=True,
        widens_logits=True,
        gradients_in_place=found.fused_gradients,
    )
    return Keeps(
        kernels,
        found.flash,
        found.drops_in_flash,
        found.chunked_loss,
        found.sharded_optimizer,
        ("bf16", "fp16") if found.gradient_bytes == _NARROW else found.narrow_gradients,
        found.whole_logits,
        not found.fused_loss,
        FRAGMENTATION,
    )
