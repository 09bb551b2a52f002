"""A mixture of experts in the place of a feed-forward network, as in Mixtral (arXiv 2401.04088) and Qwen's MoE."""

from torch import Tensor, nn

from threefold.config import ModelConfig
from threefold.models.layers.basic import Linear, SwiGLU
from threefold.models.layers.router import Routing
from threefold.models.layers.sample_info import NOTHING, Samples
from threefold.parallel.expert.experts import Experts


class MixtureOfExperts(nn.Module):
    """Each token goes through the few experts that the router finds, and through the shared one where there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Linear(config.hidden_size, config.num_experts, bias=False)
        self.routing = Routing(
            config.num_experts,
            config.experts_per_token,
            config.expert_capacity_factor,
            config.normalize_expert_weights,
            config.router_aux_loss,
            config.router_z_loss,
        )
        self.experts = Experts(config.num_experts, config.hidden_size, config.expert_ffn_hidden_size)
        shared = config.shared_expert_ffn_hidden_size
        self.shared = SwiGLU(config.hidden_size, shared) if shared else None
        self.shared_gate = Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x: Tensor, samples: Samples = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        out = self.experts(x, self.routing(self.router(x), samples))
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
