"""Models of Megatron-LM: the arguments that a checkpoint holds, and the names and layouts of its tensors."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from threefold.huggingface.mapping import MOST_LAYERS, ConfigJson, Shapes, SourceRows, WeightMap, copied, interleaved
from threefold.models.gpt import GPTConfig

LATEST: Final = "latest_checkpointed_iteration.txt"
"""File that names the newest of the checkpoints in a folder."""
_REQUIRED: Final[dict[str, tuple[Any, ...]]] = {
    "num_experts": (None, 0),
    "num_moe_experts": (None, 0),
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "window_size": (None,),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
    "softmax_type": ("vanilla", None),
    "softmax_scale": (None,),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0, 0, None),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "no_rope_freq": (None,),
    "use_mup": (False, None),
    "rope_type": ("rope", None),
}
"""Arguments that change the model, and the values that models here have."""
_LLAMA_31: Final = {
    "rope_scaling": "llama3",
    "rope_original_positions": 8192,
    "rope_low_frequency_factor": 1.0,
    "rope_high_frequency_factor": 4.0,
}
"""Constants of `--use-rope-scaling`."""


def read_model(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the `model` settings of a run's arguments; raise UserError for a model that is unsupported."""
    given = ConfigJson(args, {}, where)
    for key, allowed in _REQUIRED.items():
        given.require(key, *allowed)
    heads, hidden = given.whole("num_attention_heads", least=1), given.whole("hidden_size", least=1)
    gated, norm = given.flag("swiglu"), given.take("normalization", "LayerNorm")
    positions = given.take("position_embedding_type", "learned_absolute")
    grouped = given.flag("group_query_attention")
    longest = given.take("max_position_embeddings") or given.take("seq_length")
    settings: dict[str, Any] = {
        "num_layers": given.whole("num_layers", least=1, most=MOST_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": given.whole("ffn_hidden_size", 4 * hidden, least=1),
        "vocab_size": given.whole("padded_vocab_size", least=1),
        "max_position_embeddings": given.with_values(max_position_embeddings=longest).whole(
            "max_position_embeddings", least=1
        ),
        "hidden_dropout": float(given.number("hidden_dropout", 0.1)),
        "attention_dropout": float(given.number("attention_dropout", 0.1)),
        "norm_eps": float(given.number("norm_epsilon", 1e-5)),
        "initializer_range": float(given.number("init_method_std", 0.02)),
        "tie_embeddings": not given.flag("untie_embeddings_and_output_weights"),
    }
    if positions not in ("rope", "learned_absolute"):
        raise given.refuse("position_embedding_type", positions, "rope and learned_absolute")
    width = given.whole("kv_channels", hidden // heads, least=1)
    rope = {"position_embedding": "rope", "rope_theta": float(given.number("rotary_base", 10000))}
    biases, share = given.flag("add_bias_linear", True), float(given.number("rotary_percent", 1.0))
    if (gated, norm) == (True, "RMSNorm"):
        if positions != "rope":
            raise given.refuse("position_embedding_type", positions, "rope for models with swiglu and RMSNorm")
        if biases:
            raise given.refuse("add_bias_linear", biases, "no biases in models with swiglu and RMSNorm")
        if given.flag("use_rope_scaling"):
            rope |= {**_LLAMA_31, "rope_factor": float(given.number("rope_scaling_factor", 8.0))}
        return (
            settings
            | rope
            | {
                "architecture": "llama",
                "num_key_value_heads": given.whole("num_query_groups", heads, least=1) if grouped else heads,
                "head_dim": width,
                "qkv_bias": given.flag("add_qkv_bias"),
                "qk_norm": given.flag("qk_layernorm"),
                **({"rotary_share": share} if share != 1 else {}),
                **({"norm_offset": True} if given.flag("apply_layernorm_1p") else {}),
            }
        )
    if gated or norm != "LayerNorm":
        raise given.refuse("normalization", norm, "RMSNorm with swiglu (Llama), and LayerNorm without (GPT)")
    for key, value in (("qk_layernorm", False), ("apply_layernorm_1p", False), ("use_rope_scaling", False)):
        given.require(key, value)
    if not biases:
        raise given.refuse("add_bias_linear", biases, "biases in models with LayerNorm")
    if grouped and given.whole("num_query_groups", heads) != heads:
        raise given.refuse("num_query_groups", given.take("num_query_groups"), "as many groups as heads with LayerNorm")
    if width * heads != hidden:
        raise given.refuse(
            "kv_channels", width, f"hidden_size / num_attention_heads, {hidden // heads}, with LayerNorm"
        )
    if positions == "rope" and share != 1:
        raise given.refuse("rotary_percent", share, "1.0 with LayerNorm")
    tanh = given.flag("openai_gelu") or given.flag("bias_gelu_fusion", True)
    return (
        settings
        | (rope if positions == "rope" else {"position_embedding": "learned"})
        | {
            "architecture": "gpt",
            "activation": "relu2" if given.flag("squared_relu") else "gelu_tanh" if tanh else "gelu",
        }
    )


_OUTSIDE: Final = {
    "embed.tokens.weight": "embedding.word_embeddings.weight",
    "embed.positions.weight": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.output.weight": "output_layer.weight",
}
_MODULES: Final = {
    "attn.qkv": "self_attention.linear_qkv",
    "attn.q_norm": "self_attention.q_layernorm",
    "attn.k_norm": "self_attention.k_layernorm",
    "attn.proj": "self_attention.linear_proj",
    "mlp.up": "mlp.linear_fc1",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_NORMS: Final = {
    "attn_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
}
"""Names of the norms of a block: in the linear layer that follows, as in `torch_dist`, or on their own."""
HEAD: Final = "output_layer.weight"


def weight_maps(shapes: Shapes, present: Collection[str]) -> list[WeightMap]:
    """Map every parameter to the tensors of Megatron-LM, whose names have the numbers of layers.

    Queries, keys and values are grouped alike on both sides, by key-value head. `present` are names of the tensors,
    which decide between two names of the norms.
    """
    maps = []
    for name, shape in shapes.items():
        if name in _OUTSIDE:
            maps.append(copied(name, _OUTSIDE[name], shapes))
            continue
        _, layer, in_block = name.split(".", 2)
        module, _, kind = in_block.rpartition(".")
        block = f"decoder.layers.{layer}."
        if module in _NORMS:
            fused, alone = (block + each + kind for each in _NORMS[module])
            maps.append(copied(name, alone if alone in present else fused, shapes))
            continue
        tensor = f"{block}{_MODULES[module]}.{kind}"
        if module == "mlp.gate_up":
            sources = [SourceRows(tensor), SourceRows(tensor, start=shape[0] // 2)]
            maps.append(interleaved(name, shape, sources))
        else:
            maps.append(copied(name, tensor, shapes))
    return maps


def joined_dim(name: str) -> int | None:
    """Return the dim along which tensor-parallel ranks divide a tensor; None if each has the whole."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer") and kind in ("weight", "bias"):
        return 0
    return 1 if last in ("linear_proj", "linear_fc2") and kind == "weight" else None


def write_args(model: Any) -> dict[str, Any]:
    """Return the arguments of a model, as `read_model` reads them."""
    gpt = isinstance(model, GPTConfig)
    values: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "padded_vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "seq_length": model.max_position_embeddings,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "norm_epsilon": model.norm_eps,
        "init_method_std": model.initializer_range,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "position_embedding_type": "rope" if model.position_embedding == "rope" else "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(model.rope_theta) if model.rope_theta % 1 == 0 else model.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "normalization": "LayerNorm" if gpt else "RMSNorm",
        "apply_layernorm_1p": False,
        "add_bias_linear": gpt,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "swiglu": not gpt,
        "squared_relu": False,
        "openai_gelu": False,
        "bias_gelu_fusion": False,
        "num_experts": None,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": model.head_dim,
    }
    if isinstance(model, GPTConfig):
        return values | {
            "squared_relu": model.activation == "relu2",
            "openai_gelu": model.activation == "gelu_tanh",
        }
    return values | {
        "rotary_percent": model.rotary_share,
        "apply_layernorm_1p": model.norm_offset,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "group_query_attention": True,
        "num_query_groups": model.num_key_value_heads,
        "use_rope_scaling": model.rope_scaling == "llama3",
        "rope_scaling_factor": model.rope_factor,
    }
