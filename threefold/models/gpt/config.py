"""The `model` section of a GPT: what all families have, and nothing else."""

from typing import Literal

from threefold.config.model import ModelConfig


class GPTConfig(ModelConfig):
    """GPT-2 or GPT-3."""

    architecture: Literal["gpt"] = "gpt"
