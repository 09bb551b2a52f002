"""The family of DeepSeek-V2 and V3: its `model` section, with latent attention and experts."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from threefold.models.family import Family
from threefold.models.layers.latent_config import LatentConfig
from threefold.models.layers.mixture_config import MixtureConfig, Router
from threefold.models.layers.prediction_config import PredictionConfig


class DeepseekConfig(LatentConfig, MixtureConfig, PredictionConfig):
    """DeepSeek-V2 or V3."""

    architecture: Literal["deepseek"] = "deepseek"
    router: Router = "sigmoid"
    router_bias_rate: float = Field(default=0.001, ge=0)
    comes_after: ClassVar[dict[str, str]] = {**MixtureConfig.comes_after, **LatentConfig.comes_after}
    unlisted: ClassVar[frozenset[str]] = MixtureConfig.unlisted | PredictionConfig.unlisted

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from self.broken_by_setting_unused()
        yield from self.broken_by_latents()
        yield from self.broken_by_experts()


FAMILY = Family(
    title="DeepSeek",
    config=DeepseekConfig,
    model="threefold.models.deepseek.model:Deepseek",
    plan="threefold.models.deepseek.sharding:deepseek_plan",
    huggingface="threefold.huggingface.deepseek:TYPES",
    shapes="threefold.models.deepseek.sharding:layer_shapes",
)
