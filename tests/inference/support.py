"""The slow way: the whole model in one process, all tokens through it every time."""

import torch
from torch import Tensor

from threefold.checkpoint.tensors import load_tensors
from threefold.inference.model import Trained
from threefold.models.family import make_model


class Oracle:
    """A model of plain torch modules in fp64, with the weights of a checkpoint."""

    def __init__(self, trained: Trained) -> None:
        self.context = trained.config.data.sequence_length
        self.model = make_model(trained.config.model).double().eval()
        weights = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        load_tensors(weights, trained.checkpoint.path, alone=True)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[S, V], of one sequence."""
        return self.model(torch.tensor([tokens]))[0]

    def greedy(self, tokens: list[int], new_tokens: int, known: int, ends: frozenset[int]) -> list[int]:
        """The likeliest of the first `known` tokens, again and again.

        Where the context is full, the older half is let go.
        """
        tokens, added = tokens[-self.context :], []
        for _ in range(new_tokens):
            if len(tokens) > self.context:
                tokens = tokens[-((self.context + 1) // 2) :]
            token = int(self.logits(tokens)[-1, :known].argmax())
            if token in ends:
                break
            added.append(token)
            tokens.append(token)
        return added
