"""The slow way: the whole model in one process, all tokens through it every time; and a config of each family."""

from typing import Any

import torch
from torch import Tensor

from threefold.checkpoint.tensors import load_tensors
from threefold.inference.model import Trained
from threefold.models.family import make_model

MIXTURE = {"num_experts": 8, "expert_ffn_hidden_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo": {
        "attention_pattern": "1 sliding : 1 full",
        "sliding_window": 5,
        "rope_scaling": "yarn",
        "rope_factor": 2.0,
    },
    "gemma": {
        "attention_pattern": "2 sliding : 1 full",
        "sliding_window": 2,
        "sliding_rope_theta": 50.0,
        "qk_norm": True,
        "attention_softcap": 1.0,
        "logit_softcap": 3.0,
    },
    "glm": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_oss": {**MIXTURE, "attention_pattern": "1 sliding : 1 full", "sliding_window": 5, "num_key_value_heads": 2},
    "deepseek": {**MIXTURE, "router_groups": 4, "router_groups_chosen": 2, "routed_scale": 2.5, "mtp_layers": 1},
}
"""What the families have besides their defaults; a window of two is shorter than all prompts but one."""


class Oracle:
    """A model of plain torch modules in fp64, with the weights of a checkpoint."""

    def __init__(self, trained: Trained) -> None:
        self.context = trained.config.data.sequence_length
        self.model = make_model(trained.config.model).double().eval()
        weights = {
            f"model.{name}": weight for name, weight in (*self.model.named_parameters(), *self.model.named_buffers())
        }
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
