"""Sampling of the next token: temperature, top-k and top-p (nucleus)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.errors import UserError
from threefold.random.keys import stream_key


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

    Attributes:
        temperature: divisor of the logits; 0 = greedy.
        top_k: sample from the k most likely tokens; 0 or None for all.
        top_p: nucleus threshold: sample from the smallest set of most likely tokens with at least this total
            probability, after `top_k` (Holtzman et al., arXiv 1904.09751); 0, 1 or None for all.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"--temperature is {self.temperature:g} but must be at least 0; 0 is greedy.")
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k} but must be at least 0; 0 samples from all tokens.")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p:g} but must be between 0 and 1; 1 samples from all tokens.")

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Sample a token for each row.

        Args:
            logits: [B, V].
            uniform: fp64 [B], a random number in [0, 1) for each row.

        Returns:
            int64 [B].
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = (logits.double() / self.temperature).sort(dim=-1, descending=True, stable=True)
        probabilities = ordered[:, : self.top_k or None].softmax(-1)
        if self.top_p:
            # A token is kept while those before it are below the threshold, so the first always is.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        sums = probabilities.cumsum(-1)
        place = torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[:, -1:], right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1  # the product may be rounded up to the whole sum
        return tokens.gather(-1, place.minimum(last)).squeeze(-1)


def uniform(seed: int, sequence: str, position: int) -> float:
    """A random number in [0, 1) for the token at `position` of a sequence, a function of the arguments alone."""
    return (stream_key("choice", seed, sequence, position) >> 10) / 2**53
