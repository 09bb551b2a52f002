"""Settings of a mixture of experts (MoE), for the families that can have one."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

from pydantic import Field

from threefold.config.model import MOST_LAYERS, WIDEST_FFN, ModelConfig
from threefold.config.section import derived

FOR_EXPERTS: Final = (
    "experts_per_token",
    "expert_ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "shared_expert_gate",
    "normalize_expert_weights",
    "expert_capacity_factor",
    "moe_every",
    "dense_layers",
    "router_aux_loss",
    "router_z_loss",
)
"""Settings that need `num_experts`."""
_MOST_EXPERTS: Final = 2**14


class MixtureConfig(ModelConfig):
    """The `model` section of a family whose layers may have experts."""

    num_experts: int = Field(default=0, ge=0, le=_MOST_EXPERTS)
    """For `llama`: number of experts that replace the feed-forward network; each token is sent to a few of them. 0 for
    none."""
    experts_per_token: int = Field(default=2, ge=1, le=_MOST_EXPERTS)
    """Number of experts that each token is sent to."""
    expert_ffn_hidden_size: int = derived(ge=1, le=WIDEST_FFN)
    """Inner width of an expert; a multiple of `parallel.tp`. Default: `ffn_hidden_size`."""
    shared_expert_ffn_hidden_size: int = Field(default=0, ge=0, le=WIDEST_FFN)
    """Inner width of a shared expert that every token passes through besides its own experts; 0 for none."""
    shared_expert_gate: bool = False
    """Whether a gate scales the shared expert's output for each token, as in Qwen2-MoE."""
    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1, as in Mixtral."""
    expert_capacity_factor: float = Field(default=0.0, ge=0)
    """Maximum number of tokens of a sequence that an expert takes in training, as a multiple of its even share; it
    drops later ones. 0 for no limit (dropless)."""
    moe_every: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """With `num_experts`: spacing of the layers with experts; n gives experts to the last of every n layers."""
    dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """With `num_experts`: number of first layers without experts."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Weight of the load balancing loss, which spreads tokens over the experts, for each token and layer."""
    router_z_loss: float = Field(default=0.0, ge=0)
    """Weight of the z-loss, which keeps the router's logits small."""

    comes_after: ClassVar[dict[str, str]] = {"num_experts": "norm_eps"}

    def filled(self, sequence_length: int) -> dict[str, Any]:
        width = self.ffn_hidden_size or self.default_ffn_hidden_size()
        return super().filled(sequence_length) | {"expert_ffn_hidden_size": width}

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect given the others, each with the rule against setting it."""
        if not self.num_experts:
            for name in FOR_EXPERTS:
                yield name, "model.num_experts is 0; use num_experts 8 or leave it out"
        yield from super().unused()

    def broken_by_experts(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that break a rule of a mixture, each with the rule, for a family's `broken_rules`."""
        if not self.num_experts:
            return
        if self.experts_per_token > self.num_experts:
            yield "experts_per_token", f"model.num_experts is {self.num_experts}; use at most {self.num_experts}"
        if not any(self.has_experts(layer) for layer in range(self.num_layers)):
            key = "moe_every" if self.moe_every > self.num_layers else "dense_layers"
            nearest = self.num_layers if key == "moe_every" else 0
            yield key, f"none of the {self.num_layers} layers has experts then; use {nearest}"
        if self.shared_expert_gate and not self.shared_expert_ffn_hidden_size:
            rule = "model.shared_expert_ffn_hidden_size is 0, so there is nothing to weigh; use false"
            yield "shared_expert_gate", rule
