"""Small layers that the models share, for one device; the mesh's versions take their place when a model is split."""

from torch import Tensor, nn
from torch.nn import functional as F

from threefold.kernels import embedding, linear
from threefold.labels import IGNORED
from threefold.parallel.samples import NOTHING, Samples


class Linear(nn.Linear):
    """`nn.Linear`, by the fastest way there is."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding`, with a gradient that is exact for narrow tables too."""

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] → [..., H]."""
        return embedding(input, self.weight)


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

    def forward(self, x: Tensor, samples: Samples = NOTHING) -> Tensor:
        """[..., H] → [..., H]; nothing of the samples matters."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class CrossEntropy(nn.Module):
    """The loss of each token, computed in fp32 at least."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`logits` [..., V], `labels` int64 [...] → [...]; zero where the label is -100."""
        logits = logits if logits.itemsize >= 4 else logits.float()
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(labels.shape)
