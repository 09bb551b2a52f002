"""Settings of a mixture of experts (MoE), for the families that can have one."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from threefold.config.model import MOST_LAYERS, WIDEST_FFN, ModelConfig
from threefold.config.section import derived, divisors

_UNLISTED: Final = (
    "router",
    "router_bias_rate",
    "router_groups",
    "router_groups_chosen",
    "routed_scale",
    "router_sequence_loss",
    "router_bias",
    "expert_bias",
    "expert_gate_limit",
)
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
    *_UNLISTED,
)
"""Settings that need `num_experts`."""
_MOST_EXPERTS: Final = 2**14
_ROUND: Final = 16  # the default inner width of SwiGLU is a multiple of it

Router = Literal["softmax", "sigmoid", "softmax_chosen"]


class MixtureConfig(ModelConfig):
    """The `model` section of a family whose layers have SwiGLU networks, and may have several as experts."""

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
    router: Router = "softmax"
    """Scores of a token's experts: the `softmax` of the router's logits; their `sigmoid`, to which an expert's bias is
    added for the choice alone, as in DeepSeek-V3; or `softmax_chosen`, the softmax over the chosen logits, as in
    gpt-oss."""
    router_bias_rate: float = Field(default=0.0, ge=0)
    """Rate at which the expert biases follow the load, instead of a loss (arXiv 2408.15664): after each update, that of
    an expert grows by it if fewer tokens of the global batch chose the expert than the mean, and shrinks if more did.
    Tokens without a label that counts are left out. 0 keeps the biases."""
    router_groups: int = Field(default=0, ge=0, le=_MOST_EXPERTS)
    """Number of groups of neighboring experts, of which a token's experts come from a few, as in DeepSeek-V3; 0 for no
    groups."""
    router_groups_chosen: int = Field(default=1, ge=1, le=_MOST_EXPERTS)
    """Number of groups that a token's experts come from: those with the largest sum of their two best scores (with
    `router: softmax` those with the best score, as in DeepSeek-V2)."""
    routed_scale: float = Field(default=1.0, gt=0)
    """Factor of the weights of a token's experts."""
    router_sequence_loss: float = Field(default=0.0, ge=0)
    """Weight of the load balancing loss of DeepSeek-V3, of each sequence's best scores without biases and groups, for
    each token and layer."""
    router_bias: bool = False
    """Whether the router's logits have a trained bias, as in gpt-oss."""
    expert_bias: bool = False
    """Whether the two layers of each expert have biases, as in gpt-oss."""
    expert_gate_limit: float = Field(default=0.0, ge=0)
    """Limit c of the gated features of experts, as in gpt-oss: (up + 1) · gate · sigmoid(1.702 · gate), of gates of at
    most c and ups between -c and c; 0 for SwiGLU."""

    unlisted: ClassVar[frozenset[str]] = ModelConfig.unlisted.union(_UNLISTED)
    comes_after: ClassVar[dict[str, str]] = {"num_experts": "norm_eps"}

    def default_ffn_hidden_size(self) -> int:
        """Return 8/3 of the hidden size, which gives SwiGLU's three matrices the parameters of a GELU network's two."""
        return -(-8 * self.hidden_size // (3 * _ROUND)) * _ROUND

    def filled(self, sequence_length: int) -> dict[str, Any]:
        width = self.ffn_hidden_size or self.default_ffn_hidden_size()
        return super().filled(sequence_length) | {"expert_ffn_hidden_size": width}

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect given the others, each with the rule against setting it."""
        if not self.num_experts:
            for name in FOR_EXPERTS:
                yield name, "model.num_experts is 0; use num_experts 8 or leave it out"
        elif not self.router_groups:
            yield "router_groups_chosen", "model.router_groups is 0; use router_groups 4 or leave it out"
        yield from super().unused()

    @property
    def has_expert_bias(self) -> bool:
        """Whether the choice of experts adds a bias to each one's score."""
        return self.router == "sigmoid" or self.router_bias_rate > 0

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
        if self.router == "softmax_chosen" and not self.normalize_expert_weights:
            yield "normalize_expert_weights", "the weights of model.router softmax_chosen add up to 1; use true"
        if self.router_bias_rate and self.expert_capacity_factor:
            rule = (
                f"model.router_bias_rate {self.router_bias_rate:g} balances the experts without dropping tokens; use 0"
            )
            yield "expert_capacity_factor", rule
        yield from self._broken_by_groups()

    def _broken_by_groups(self) -> Iterator[tuple[str, str]]:
        groups, chosen, experts = self.router_groups, self.router_groups_chosen, self.num_experts
        if not groups:
            return
        most = max(1, experts // 2)  # two experts in each
        if groups == 1:
            yield "router_groups", "one group of all experts is no choice among groups; use 0"
        elif experts % groups or (groups > most and self.router != "softmax"):
            nearest = min((n for n in divisors(experts) if n <= most), key=lambda count: (abs(count - groups), count))
            rule = f"must divide model.num_experts {experts} into groups of at least two"
            yield "router_groups", f"{rule}; use {nearest if nearest > 1 else 0}"
        elif chosen > groups:
            yield "router_groups_chosen", f"model.router_groups is {groups}; use at most {groups}"
        elif chosen * (experts // groups) < self.experts_per_token:
            least = -(-self.experts_per_token // (experts // groups))
            rule = f"its groups have fewer experts than model.experts_per_token {self.experts_per_token}; use {least}"
            yield "router_groups_chosen", rule
