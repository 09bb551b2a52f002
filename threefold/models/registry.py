"""Which model a config asks for."""

from threefold.config import ModelConfig
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import Decoder
from threefold.models.llama.model import Llama
from threefold.models.llama.sharding import llama_plan
from threefold.models.sharding import ModelPlan

_MODELS: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
_PLANS = {"gpt": gpt_plan, "llama": llama_plan}


def make_model(config: ModelConfig) -> Decoder:
    """The whole, single-device model.

    Args:
        config: its sizes, resolved (no field is None).
    """
    return _MODELS[config.architecture](config)


def model_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    """How it is cut.

    Args:
        config: the model's sizes.
        sequence_length: tokens per sample, for what attention costs.
    """
    return _PLANS[config.architecture](config, sequence_length)
