"""How the next token is chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.errors import UserError
from threefold.random.keys import stream_key


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: what the logits are divided by; 0 takes the likeliest.
        top_k: choose among so many likeliest tokens; 0 or None for all.
        top_p: choose among the fewest likeliest tokens that together have this probability, after `top_k` (nucleus
            sampling; Holtzman et al., arXiv 1904.09751); 0, 1 or None for all.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(
                f"--temperature is {self.temperature:g} but must be at least 0; 0 takes the likeliest token."
            )
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k} but must be at least 0; 0 chooses among all tokens.")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p:g} but must lie between 0 and 1; 1 chooses among all tokens.")

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """A token for each row.

        Args:
            logits: [B, V].
            uniform: fp64 [B], a random number from [0, 1) for each row.

        Returns:
            int64 [B].
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = (logits.double() / self.temperature).sort(dim=-1, descending=True, stable=True)
        probabilities = ordered[:, : self.top_k or None].softmax(-1)
        if self.top_p:
            # A token is in as long as those before it do not have the mass yet, so the first always is.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        sums = probabilities.cumsum(-1)
        place = torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[:, -1:], right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1  # the product may have been rounded up to the whole sum
        return tokens.gather(-1, place.minimum(last)).squeeze(-1)


def uniform(seed: int, sequence: str, position: int) -> float:
    """A random number from [0, 1) for the token at `position` of a sequence, a function of the three alone."""
    return (stream_key("choice", seed, sequence, position) >> 10) / 2**53
