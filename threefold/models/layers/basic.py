"""Small layers that the models share, for one device; the mesh's versions take their place when a model is split."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from threefold.labels import IGNORED
from threefold.models.layers.sample_info import NOTHING, Samples
from threefold.ops.kernels import embedding, linear
from threefold.parallel.tensor.chunked_loss import chunked_cross_entropy
from threefold.parallel.tensor.loss import check_labels


class Linear(nn.Linear):
    """`nn.Linear`, by the fastest way there is."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return linear(input, self.weight, self.bias)

    def with_weight(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
        """`compute(x, weight)` in the place of this layer's product."""
        return compute(x, self.weight)


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

    def chunked(self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        """The same of the logits `x` [..., H] times `weight` [V, H], of which `chunk` columns are in memory at once."""
        check_labels(labels, len(weight))
        return chunked_cross_entropy(x, weight, labels, chunk)


class LinearCrossEntropy(nn.Module):
    """The head's product and the loss of each token together, so that the logits need not be in memory all at once.

    Attributes:
        chunk_size: columns of the logits that are (set by `chunk_loss_`); 0 for all.
    """

    chunk_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = CrossEntropy()

    def forward(self, x: Tensor, output: Linear, labels: Tensor) -> Tensor:
        """`x` [..., H], the layer `output` that makes logits [..., V] of it, `labels` int64 [...] → [...].

        Raises:
            ValueError: the layer has a bias and the logits are not computed all at once.
        """
        if self.chunk_size == 0:
            return self.cross_entropy(output(x), labels)
        if output.bias is not None:
            raise ValueError(f"chunk_size is {self.chunk_size} but the output layer has a bias; use 0 or bias=False")
        return output.with_weight(lambda x, weight: self.cross_entropy.chunked(x, weight, labels, self.chunk_size), x)


def chunk_loss_(modules: Iterable[nn.Module], size: int) -> None:
    """Have every `LinearCrossEntropy` among these modules and inside them compute so many columns of logits at once.

    Args:
        modules: a model, or a rank's stages of one.
        size: at least 1, or 0 for all.
    """
    for module in modules:
        for child in module.modules():
            if isinstance(child, LinearCrossEntropy):
                child.chunk_size = size
