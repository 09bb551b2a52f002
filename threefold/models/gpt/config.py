"""The `model` section of a GPT: what all families have, its activation function and the dropout of its embeddings."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from threefold.config.model import ModelConfig
from threefold.config.section import derived

Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", "silu"]


class GPTConfig(ModelConfig):
    """GPT-2 or GPT-3."""

    architecture: Literal["gpt"] = "gpt"
    activation: Activation = Field(default="gelu_tanh")
    """For `gpt`: the function between the two layers of the feed-forward network: `gelu_tanh` (GELU by its tanh
    approximation, as in GPT-2; Hugging Face's `gelu_new`), `gelu` (exact), `quick_gelu` (by a sigmoid), `relu`, `relu2`
    (squared ReLU) or `silu`."""
    embedding_dropout: float = derived(ge=0, lt=1)
    """For `gpt`: probability of dropping an element of the embeddings. Default: `hidden_dropout`."""

    comes_after: ClassVar[dict[str, str]] = {
        "activation": "ffn_hidden_size",
        "embedding_dropout": "hidden_dropout",
    }

    def filled(self, sequence_length: int) -> dict[str, Any]:
        """Values of the settings that follow from others."""
        return super().filled(sequence_length) | {"embedding_dropout": self.hidden_dropout}
