"""The shapes of Llama's weights, without torch: what the constructors of `model.py` make."""

from threefold.models.family import Shapes
from threefold.models.llama.config import LlamaConfig


def layer_shapes(config: LlamaConfig, layer: str) -> Shapes:
    """The shape of each parameter of a layer, by its name in the layer, in order.

    Args:
        config: the model's sizes, resolved.
        layer: its name in the model.
    """
    hidden = config.hidden_size
    if layer == "embed":
        return {"tokens.weight": (config.vocab_size, hidden)}
    if layer == "head":
        return {"norm.weight": (hidden,), "output.weight": (config.vocab_size, hidden)}
    width = config.num_attention_heads * config.head_dim
    rows = width + 2 * config.num_key_value_heads * config.head_dim
    heads = {"attn.q_norm.weight": (config.head_dim,), "attn.k_norm.weight": (config.head_dim,)}
    number = int(layer.rpartition(".")[2])
    return {
        "attn_norm.weight": (hidden,),
        "attn.qkv.weight": (rows, hidden),
        **({"attn.qkv.bias": (rows,)} if config.qkv_bias else {}),
        **(heads if config.qk_norm else {}),
        "attn.proj.weight": (hidden, width),
        "mlp_norm.weight": (hidden,),
        **(_experts(config) if config.has_experts(number) else _gated("mlp", hidden, config.ffn_hidden_size)),
    }


def _experts(config: LlamaConfig) -> Shapes:
    hidden, experts, inner = config.hidden_size, config.num_experts, config.expert_ffn_hidden_size
    shared = config.shared_expert_ffn_hidden_size
    return {
        "mlp.router.weight": (experts, hidden),
        "mlp.experts.gate_up": (experts, 2 * inner, hidden),
        "mlp.experts.down": (experts, hidden, inner),
        **(_gated("mlp.shared", hidden, shared) if shared else {}),
        **({"mlp.shared_gate.weight": (1, hidden)} if config.shared_expert_gate else {}),
    }


def _gated(name: str, hidden: int, inner: int) -> Shapes:
    return {f"{name}.gate_up.weight": (2 * inner, hidden), f"{name}.down.weight": (hidden, inner)}
