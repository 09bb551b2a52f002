"""The family of GPT-2 and GPT-3."""

from threefold.models.family import Family
from threefold.models.gpt.config import GPTConfig

FAMILY = Family(
    title="GPT",
    config=GPTConfig,
    model="threefold.models.gpt.model:GPT",
    plan="threefold.models.gpt.sharding:gpt_plan",
    huggingface="threefold.models.gpt.huggingface:TYPES",
    shapes="threefold.models.gpt.sharding:layer_shapes",
)
