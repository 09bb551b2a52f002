"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): blocks that predict tokens after the next one.

The head holds them, since they start from its normalized input: the depth k joins the features of depth k - 1 with the
embedding of the token k positions on, runs one more block, and predicts the token after that one, through the shared
embedding and projection to the vocabulary. They are of training alone.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from threefold.constants import IGNORE_INDEX
from threefold.models.layers.decoder import NOTHING, Embedding, Linear, SampleInfo, TermsHead


def look_ahead(samples: SampleInfo, tokens: Tensor, labels: Tensor, depths: int) -> SampleInfo:
    """Return `samples` with the further tokens and labels of whole sequences, int64 [B, S], within each document."""
    found, weights, size = [], [], tokens.shape[1]
    documents = None if samples.documents is None else samples.documents.to(tokens.device)
    for depth in range(1, depths + 1):
        inside = torch.arange(size, device=tokens.device).expand_as(tokens) < size - depth
        if documents is not None:
            inside = inside & (documents.roll(-depth, 1) == documents)
        token = tokens.roll(-depth, 1).masked_fill(~inside, 0)
        found.append(torch.stack((token, labels.roll(-depth, 1).masked_fill(~inside, IGNORE_INDEX)), 1))
        if samples.weights is not None:
            outside = ~inside.to(samples.weights.device)
            weights.append(samples.weights.roll(-depth, 1).masked_fill(outside, 0))
    return samples._replace(ahead=torch.stack(found, 1), ahead_weights=torch.stack(weights, 1) if weights else None)


class Depth(nn.Module):
    """One further prediction: features and embeddings, each normalized, joined and sent through one more block."""

    def __init__(self, hidden: int, norm: Callable[[], nn.Module], block: nn.Module) -> None:
        super().__init__()
        self.embed_norm, self.hidden_norm = norm(), norm()
        self.join = Linear(2 * hidden, hidden, bias=False)
        self.block = block
        self.norm = norm()

    def forward(self, x: Tensor, embedded: Tensor, samples: SampleInfo) -> Tensor:
        """Features and embeddings [B, S, H] → [B, S, H], normalized for the projection to the vocabulary."""
        both = torch.cat((self.embed_norm(embedded), self.hidden_norm(x)), -1)
        return self.norm(self.block(self.join(both), samples))


class PredictingHead(TermsHead):
    """Head with further predictions, whose mean loss has the weight `weight`.

    Args:
        head: norm, features, vocabulary and cap of the logits, as for `Head`.
        norm: makes the norms.
        blocks: block of each depth.
        scale: factor of the embeddings.
    """

    def __init__(
        self,
        head: tuple[nn.Module, int, int, float],
        norm: Callable[[], nn.Module],
        blocks: Iterable[nn.Module],
        weight: float,
        scale: float,
    ) -> None:
        super().__init__(*head)
        _, hidden, vocab, _ = head
        self.tokens = Embedding(vocab, hidden)  # the decoder's own table
        self.depths = nn.ModuleList(Depth(hidden, norm, block) for block in blocks)
        self.weight, self.embedding_scale = weight, scale
        self._terms: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Tensor:
        """Compute logits or the summed loss as `Head` does, in training with the further losses (`look_ahead`)."""
        if labels is None or samples.ahead is None or not self.training:
            return super().forward(x, labels)
        x = self.norm(x)
        losses = [self.loss(x, self.output, labels).sum()]
        for number, depth in enumerate(self.depths):
            tokens, further = samples.ahead[:, number].unbind(1)
            weights = None if samples.ahead_weights is None else samples.ahead_weights[:, number]
            embedded = self.tokens(tokens)
            embedded = embedded if self.embedding_scale == 1 else embedded * self.embedding_scale
            x = depth(x, embedded, samples._replace(weights=weights))
            losses.append(self.loss(x, self.output, further).sum())
        terms = torch.stack(losses)
        if torch.is_grad_enabled():
            self._keep(terms.detach())
        total: Tensor = terms[0] + terms[1:].sum() * (self.weight / len(self.depths))
        return total

    # Compiled code would be specialized to the number of kept terms.
    @torch.compiler.disable
    def _keep(self, terms: Tensor) -> None:
        self._terms.append(terms)

    def take_terms(self) -> list[Tensor]:
        """Return the sums of the losses of the next token and each further one, each [1 + depths]."""
        terms, self._terms = self._terms, []
        return terms
