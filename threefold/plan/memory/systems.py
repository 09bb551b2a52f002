"""What training systems keep in memory where they differ."""

from dataclasses import dataclass, field

from threefold.config import Config
from threefold.plan.activations import Attention, Kernels
from threefold.plan.model_size import RankSize


@dataclass(frozen=True)
class Keeps:
    """What a system keeps on a device.

    Attributes:
        kernels: what its kernels keep.
        flash: whether attention is fused.
        chunked_loss: whether `train.loss_chunk_size` is followed.
        fragmentation: what the allocator loses, as a share of what comes and goes.
    """

    kernels: Kernels = field(default_factory=Kernels)
    flash: bool = True
    chunked_loss: bool = True
    fragmentation: float = 0.0

    def attention(self, own: Attention) -> Attention:
        """How attention computes, where this package's would compute as `own` says."""
        return own if self.flash else "dropped"

    def states(self, own: RankSize, config: Config) -> RankSize:
        """The bytes of states, where this package's would be `own`."""
        return own


def keeps_of(system: str, device: str) -> Keeps:
    """What a training system keeps.

    Args:
        system: its name.
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        return Keeps()
    return Keeps(Kernels(fused_norm=True, wide_statistics=True, grouped=True))
