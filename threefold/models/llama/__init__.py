"""The family of Llama, Mistral, Mixtral and Qwen."""

from threefold.models.family import Family
from threefold.models.llama.config import LlamaConfig

FAMILY = Family(
    title="Llama",
    config=LlamaConfig,
    model="threefold.models.llama.model:Llama",
    plan="threefold.models.llama.sharding:llama_plan",
    huggingface="threefold.models.llama.huggingface:TYPES",
    shapes="threefold.models.llama.sharding:layer_shapes",
)
