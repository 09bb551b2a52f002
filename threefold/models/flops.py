"""Model FLOPs: what a model's forward and backward passes compute per token, however they are computed.

As Megatron-LM counts them (arXiv 2104.04473, appendix; arXiv 2205.05198, appendix A): matrix products alone, two
operations for each multiply-add, the backward pass as twice the forward pass, attention as over the whole square of
positions although half of it is masked, and nothing for what is recomputed. MFU is the share of a device's peak rate
that these take (PaLM, arXiv 2204.02311, appendix B).
"""

from threefold.config.model import OWN, ModelConfig
from threefold.models.registry import model_plan

_PER_MULTIPLY_ADD = 6
"""Two operations, in the forward pass and in the backward pass for the gradients of the input and of the weight."""


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float | None:
    """FLOPs of a token's share of a training step; None for a model of one's own, whose layers tell no costs.

    Needs no torch.

    Args:
        config: of the model, resolved.
        sequence_length: tokens per sample.
    """
    if config.architecture == OWN:
        return None
    plan = model_plan(config, sequence_length)
    # The plan counts attention without the masked half of it; the look-up of the first layer is no product.
    counted = sum(plan.costs[1:])
    windows = (config.window(layer) or sequence_length for layer in range(config.num_layers))
    masked = config.num_attention_heads * config.head_dim * sum(min(window, sequence_length) for window in windows)
    return _PER_MULTIPLY_ADD * (counted + masked)
