"""The family of GPT-2 and GPT-3: its `model` section, with an activation function and embedding dropout."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from threefold.config.model import Activation
from threefold.config.section import derived
from threefold.models.family import Family
from threefold.models.layers.width_config import WidthConfig


class GPTConfig(WidthConfig):
    """GPT-2 or GPT-3."""

    architecture: Literal["gpt"] = "gpt"
    activation: Activation = Field(default="gelu_tanh")
    """For `gpt`: activation function between the two layers of the feed-forward network: `gelu_tanh` (tanh
    approximation of GELU, as in GPT-2; `gelu_new` in Hugging Face), `gelu` (exact), `quick_gelu` (sigmoid
    approximation), `relu`, `relu2` (squared ReLU) or `silu`."""
    embedding_dropout: float = derived(ge=0, lt=1)
    """For `gpt`: dropout probability of the embeddings. Default: `hidden_dropout`."""

    comes_after: ClassVar[dict[str, str]] = {"activation": "ffn_hidden_size", "embedding_dropout": "hidden_dropout"}

    def filled(self, sequence_length: int) -> dict[str, Any]:
        return super().filled(sequence_length) | {"embedding_dropout": self.hidden_dropout}


FAMILY = Family(
    title="GPT",
    config=GPTConfig,
    model="threefold.models.gpt.model:GPT",
    plan="threefold.models.gpt.sharding:gpt_plan",
    huggingface="threefold.huggingface.gpt:TYPES",
    shapes="threefold.models.gpt.sharding:layer_shapes",
)
