"""The families of OLMo, Gemma, GLM and gpt-oss: Llama's decoder with other defaults of its settings."""

from typing import Any, Literal

from pydantic import Field

from threefold.config.model import Activation
from threefold.config.section import derived
from threefold.models.family import Family
from threefold.models.layers.mixture_config import Router
from threefold.models.llama import LlamaConfig, NormPosition


class OlmoConfig(LlamaConfig):
    """OLMo 2 (arXiv 2501.00656) or 3: norms of the outputs, QK-norm over the whole width, full and sliding layers."""

    architecture: Literal["olmo"] = "olmo"  # type: ignore[assignment]  # it is this family
    norm_position: NormPosition = "after"
    qk_norm: bool = True
    qk_norm_over: Literal["head", "width"] = "width"
    rope_theta: float = Field(default=500000.0, gt=0)
    sliding_rope_scaling: bool = False
    norm_eps: float = Field(default=1e-6, gt=0, le=1)


class GemmaConfig(LlamaConfig):
    """Gemma 2 (arXiv 2408.00118) or 3 (arXiv 2503.19786): norms around each half, scaled embeddings.

    A sliding layer of Gemma 3 has another rotary base; Gemma 2 has caps of scores and logits instead of QK-norm.
    """

    architecture: Literal["gemma"] = "gemma"  # type: ignore[assignment]  # it is this family
    norm_position: NormPosition = "both"
    norm_offset: bool = True
    gate_activation: Activation = "gelu_tanh"
    embedding_scale: float = derived(gt=0)
    sliding_rope_scaling: bool = False
    norm_eps: float = Field(default=1e-6, gt=0, le=1)

    def filled(self, sequence_length: int) -> dict[str, Any]:
        return super().filled(sequence_length) | {"embedding_scale": self.hidden_size**0.5, "tie_embeddings": True}


class GlmConfig(LlamaConfig):
    """GLM-4 (arXiv 2406.12793, and the models of 0414): norms around each half, half of each head is rotated."""

    architecture: Literal["glm"] = "glm"  # type: ignore[assignment]  # it is this family
    norm_position: NormPosition = "both"
    qkv_bias: bool = True
    rotary_share: float = Field(default=0.5, gt=0, le=1)


class GptOssConfig(LlamaConfig):
    """gpt-oss (arXiv 2508.10925): sinks, biases, a softmax over the chosen experts, limited gates."""

    architecture: Literal["gpt_oss"] = "gpt_oss"  # type: ignore[assignment]  # it is this family
    qkv_bias: bool = True
    proj_bias: bool = True
    attention_sinks: bool = True
    rope_theta: float = Field(default=150000.0, gt=0)
    router: Router = "softmax_chosen"
    router_bias: bool = True
    expert_bias: bool = True
    expert_gate_limit: float = Field(default=7.0, ge=0)


def _family(title: str, config: type[LlamaConfig], name: str) -> Family:
    return Family(
        title=title,
        config=config,
        model="threefold.models.llama.model:Llama",
        plan="threefold.models.llama.sharding:llama_plan",
        huggingface=f"threefold.huggingface.{name}:TYPES",
        shapes="threefold.models.llama.sharding:layer_shapes",
    )


OLMO = _family("OLMo", OlmoConfig, "olmo")
GEMMA = _family("Gemma", GemmaConfig, "gemma")
GLM = _family("GLM", GlmConfig, "glm")
GPT_OSS = _family("gpt-oss", GptOssConfig, "gpt_oss")
