"""GPT with layers that share weights, and with some of torch's own linear layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from torch import nn

from tests.support import parity
from tests.support.parity import Case, Trace
from threefold.config import ModelConfig
from threefold.models import source
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.sharding import ModelPlan

SHARED = ("blocks.1.mlp", "blocks.3.mlp", "blocks.5.mlp")


class TiedGPT(GPT):
    """GPT in which three blocks share one feed-forward network, and another block's has torch's layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks[0].mlp.up = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.blocks[3].mlp = self.blocks[1].mlp  # the same module
        self.blocks[5].mlp.up.weight = self.blocks[1].mlp.up.weight  # the same parameters
        self.blocks[5].mlp.up.bias = self.blocks[1].mlp.up.bias
        self.blocks[5].mlp.down.weight = self.blocks[1].mlp.down.weight
        self.blocks[5].mlp.down.bias = self.blocks[1].mlp.down.bias


def tied_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    return replace(gpt_plan(config, sequence_length), shared=(SHARED,))


def _tied(run: Callable[[Case], Trace], case: Case) -> Trace:
    with patch.multiple(source, make_model=TiedGPT, model_plan=tied_plan):
        return run(case)


in_layout, one_process = partial(_tied, parity.in_layout), partial(_tied, parity.one_process)
