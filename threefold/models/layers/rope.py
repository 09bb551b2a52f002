"""The rotary positions that a config asks for."""

from threefold.config import ModelConfig
from threefold.models.layers.rotary import RopeScaling, Rotary


def rotary(config: ModelConfig) -> Rotary:
    """Turns the queries and keys of one attention layer."""
    scaling = RopeScaling(
        config.rope_scaling,
        config.rope_factor,
        config.rope_original_positions,
        config.rope_low_frequency_factor,
        config.rope_high_frequency_factor,
        config.rope_beta_fast,
        config.rope_beta_slow,
        config.rope_attention_factor,
    )
    return Rotary(config.head_dim, config.rope_theta, scaling)
