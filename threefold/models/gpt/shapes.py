"""The shapes of GPT's weights, without torch: what the constructors of `model.py` make."""

from threefold.models.family import Shapes
from threefold.models.gpt.config import GPTConfig


def layer_shapes(config: GPTConfig, layer: str) -> Shapes:
    """The shape of each parameter of a layer, by its name in the layer, in order.

    Args:
        config: the model's sizes, resolved.
        layer: its name in the model.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    if layer == "embed":
        positions = {"positions.weight": (config.max_position_embeddings, hidden)}
        return {
            "tokens.weight": (config.vocab_size, hidden),
            **(positions if config.position_embedding == "learned" else {}),
        }
    if layer == "head":
        return {**_norm("norm", hidden), "output.weight": (config.vocab_size, hidden)}
    return {
        **_norm("attn_norm", hidden),
        **_linear("attn.qkv", hidden, 3 * hidden),
        **_linear("attn.proj", hidden, hidden),
        **_norm("mlp_norm", hidden),
        **_linear("mlp.up", hidden, ffn),
        **_linear("mlp.down", ffn, hidden),
    }


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
