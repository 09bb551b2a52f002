"""The decoder, and the linear layers, embeddings (also tied), head and loss that all decoders share.

All of it is written for one device; `threefold.parallel` replaces these layers by its own.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from threefold.constants import LOGITS_AT_ONCE
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.ops.cross_entropy import check_labels, chunked_cross_entropy, cross_entropy
from threefold.ops.kernels import embedding, softcap
from threefold.random.rng import Positions, Slice


class SampleInfo(NamedTuple):
    """Inputs of layers besides the activations, for the samples of a micro-batch and their whole sequences."""

    keys: Tensor | None = None  # int64 [B], of the dropout masks; None to drop nothing
    # Int64 [B, S], the document of each token, None for plain causal attention; on the host wherever the model is, so
    # that reading the documents' bounds waits for no device.
    documents: Tensor | None = None
    weights: Tensor | None = None  # float [B, S], in the gradient of auxiliary losses; None for no such losses
    positions: Tensor | None = None  # int64 [B, S], if learned positions count by document and not by sample
    # Of multi-token prediction, None without: int64 [B, depths, 2, S], further tokens and their labels at the positions
    # that a rank works on, and float [B, depths, S], `weights` of these labels in whole sequences.
    ahead: Tensor | None = None
    ahead_weights: Tensor | None = None
    # Of pairs of documents, None without: int64 [B, S], which document of its pair each token is in (0 or 1, 2 for
    # neither), at the positions that a rank works on; and fp64 [B, 4 or 6], facts about each pair (`pairs_of`).
    sides: Tensor | None = None
    pairs: Tensor | None = None


NOTHING = SampleInfo()  # no dropout, and attention across document boundaries


class Linear(nn.Linear):
    """`nn.Linear`, computed by an arithmetic of this package, such as `Float8`."""

    unit_parts: int = 1  # of the plan's unit of output features, in a layer that replaces this one
    arithmetic: LayerArithmetic = PLAIN

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return self.arithmetic.linear(input, self.weight, self.bias)

    def with_weight(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `compute(x, weight)` instead of this layer's product."""
        return compute(x, self.weight)


class Embedding(nn.Embedding):
    """`nn.Embedding`, computed by `ops.kernels`."""

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] → [..., H]."""
        return embedding(input, self.weight)


class PositionEmbedding(nn.Embedding):
    """Learned vector for each position; `held` are the positions that the activations cover, by default all."""

    def __init__(self, num_embeddings: int, embedding_dim: int, held: Positions | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.held = held or Slice()

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Look up the positions of `x` [B, S, H]: [S, H], or [B, S, H] if they differ by sample."""
        size = x.shape[1]
        if samples.positions is not None:
            return embedding(samples.positions[:, self.held.indices(size, x.device)], self.weight)
        if isinstance(self.held, Slice):
            return self.weight[self.held.start : self.held.start + size]
        return embedding(self.held.indices(size, x.device), self.weight)

    def of_positions(self, held: Positions) -> "PositionEmbedding":
        """Return a layer with this weight for activations that cover other positions."""
        with torch.device("meta"):
            other = PositionEmbedding(self.num_embeddings, self.embedding_dim, held)
        other.weight = self.weight
        return other


class CrossEntropy(nn.Module):
    """Cross-entropy of each token in fp32 at least; on a CPU, in runs of `logits_at_once`, which changes no result."""

    def __init__(self, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.logits_at_once = logits_at_once

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`logits` [..., V], `labels` int64 [...] → [...]; zero for ignored labels."""
        return cross_entropy(logits.flatten(0, -2), labels.flatten(), self.logits_at_once).view(labels.shape)

    def chunked(
        self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, keep: bool = False, cap: float = 0.0
    ) -> Tensor:
        """Compute the loss of the logits `x` [..., H] · `weight`ᵀ [H, V], see `chunked_cross_entropy`."""
        check_labels(labels, len(weight))
        return chunked_cross_entropy(x, weight, labels, chunk, self.logits_at_once, keep, cap)


class LinearCrossEntropy(nn.Module):
    """Projection to the vocabulary and loss of each token, with `chunk_size` columns of the logits at once (0: all).

    Logits are capped by `cap` (`ops.kernels.softcap`), unless it is 0.
    """

    def __init__(
        self, chunk_size: int = 0, cross_entropy: CrossEntropy | None = None, at_once: int = 0, cap: float = 0.0
    ) -> None:
        super().__init__()
        self.cap = cap
        # With `chunk_size` 0 and no bias, `at_once` logits are widened at once (0: all); all stay in their own dtype.
        self.chunk_size, self.at_once = chunk_size, at_once
        self.cross_entropy = cross_entropy or CrossEntropy()

    def forward(self, x: Tensor, output: Linear, labels: Tensor) -> Tensor:
        """Compute each token's loss [...] from `x` [..., H], the layer `output` to logits, and int64 `labels` [...]."""
        keep = self.chunk_size == 0
        if keep and not (self.at_once and output.bias is None):
            return self.cross_entropy(self.logits(x, output), labels)
        if output.bias is not None:
            raise ValueError(f"chunk_size is {self.chunk_size} but the output layer has a bias; use 0 or no bias")
        chunk = self.chunk_size or max(1, self.at_once // labels.numel())
        cap = self.cap
        return output.with_weight(lambda x, weight: self.cross_entropy.chunked(x, weight, labels, chunk, keep, cap), x)

    def logits(self, x: Tensor, output: Linear) -> Tensor:
        """Return the logits of `x` [..., H], capped."""
        return softcap(output(x), self.cap) if self.cap else output(x)


class Head(nn.Module):
    """Final norm, projection from `hidden` features to the vocabulary, and loss; logits capped by `cap`, unless 0.

    Logits are multiplied by `scale` before.
    """

    def __init__(self, norm: nn.Module, hidden: int, vocab: int, cap: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale
        self.output = Linear(hidden, vocab, bias=False)
        self.loss = LinearCrossEntropy(cap=cap)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[B, S, H] → logits [B, S, V], or with `labels` [B, S] the sum of the losses, without ignored labels."""
        x = self.norm(x)
        x = x if self.scale == 1 else x * self.scale
        return self.loss.logits(x, self.output) if labels is None else self.loss(x, self.output, labels).sum()


class TermsHead(Head):
    """Head whose loss has several terms, which it keeps until the training step takes them."""

    def take_terms(self) -> list[Tensor]:
        """Return the sums of the terms of each forward pass since the last call, each [terms]."""
        raise NotImplementedError


class Decoder(nn.Module):
    """Embedding with the table `tokens`, blocks, and a head, which may share the table's weight: a whole model."""

    def __init__(self, embed: nn.Module, blocks: Iterable[nn.Module], head: Head, tied: bool) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        if tied:
            self.head.output.weight = self.embed.get_submodule("tokens").weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Tensor:
        """`tokens` [B, S] → logits [B, S, V], or with `labels` [B, S] the sum of the losses, without ignored labels.

        A run does not call it: `Stage` (parallel/pipeline/stage.py) calls the layers that a rank holds.
        """
        x = self.embed(tokens, samples)
        for block in self.blocks:
            x = block(x, samples)
        return self.head(x, labels)
