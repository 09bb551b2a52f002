"""The gated feed-forward network of Llama and of experts."""

from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.layers.decoder import NOTHING, Linear, SampleInfo


class SwiGLU(nn.Module):
    """A feed-forward network whose inner features are gated (Shazeer, arXiv 2002.05202).

    The rows of `gate_up` alternate, a gate's before that of what it gates, so a contiguous cut is one between features.

    Args:
        hidden: H.
        inner: F, the inner features.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * inner, bias=False)
        self.down = Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[..., H] → [..., H]; the samples are not used."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)
