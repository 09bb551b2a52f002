"""GPT-2 in Hugging Face's format: the keys of config.json and the names of the tensors."""

from collections.abc import Collection
from typing import Any, Final

from threefold.huggingface import mapping as hf
from threefold.models.gpt import GPTConfig

_NAMES: Final = hf.TensorNames(
    outside={
        "embed.tokens.weight": "transformer.wte.weight",
        "embed.positions.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.output.weight": "lm_head.weight",
    },
    in_block={
        "attn_norm.weight": "ln_1.weight",
        "attn_norm.bias": "ln_1.bias",
        "attn.proj.bias": "attn.c_proj.bias",
        "mlp_norm.weight": "ln_2.weight",
        "mlp_norm.bias": "ln_2.bias",
        "mlp.up.bias": "mlp.c_fc.bias",
        "mlp.down.bias": "mlp.c_proj.bias",
    },
    block="transformer.h.{}.",
)
_TRANSPOSED: Final = {
    "attn.proj.weight": "attn.c_proj.weight",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.down.weight": "mlp.c_proj.weight",
}
"""Matrices stored as [in, out]; those of queries, keys and values are too."""
_ACTIVATIONS: Final = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Activation functions, by their names in transformers; export writes the first name that maps to ours."""


class GPT2(hf.HuggingFaceType):
    """Hugging Face models of type `gpt2`."""

    def read(self, given: hf.ConfigJson) -> dict[str, Any]:
        hidden = given.whole("n_embd", least=1)
        activation = given.take("activation_function", "gelu_new")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            known = " or ".join(map(repr, _ACTIVATIONS))
            raise given.refuse("activation_function", activation, f"activation_function {known} alone")
        given.require("scale_attn_weights", True)
        given.require("scale_attn_by_inverse_layer_idx", False)
        given.require("add_cross_attention", False)
        embedded, hidden_dropout = (float(given.number(key, 0.1)) for key in ("embd_pdrop", "resid_pdrop"))
        more: dict[str, Any] = {}  # settings that differ from the default
        if _ACTIVATIONS[activation] != "gelu_tanh":
            more["activation"] = _ACTIVATIONS[activation]
        if embedded != hidden_dropout:
            more["embedding_dropout"] = embedded
        return {
            "num_layers": given.whole("n_layer", least=1, most=hf.MOST_LAYERS),
            "hidden_size": hidden,
            "num_attention_heads": given.whole("n_head", least=1),
            "ffn_hidden_size": given.whole("n_inner", 4 * hidden, least=1),
            "vocab_size": given.whole("vocab_size", least=1),
            "max_position_embeddings": given.whole("n_positions", 1024, least=1),
            "hidden_dropout": hidden_dropout,
            "attention_dropout": float(given.number("attn_pdrop", 0.1)),
            "position_embedding": "learned",
            "norm_eps": float(given.number("layer_norm_epsilon", 1e-5)),
            "initializer_range": float(given.number("initializer_range", 0.02)),
            "tie_embeddings": given.flag("tie_word_embeddings", True),
            **more,
        }

    def write(self, model: GPTConfig) -> dict[str, Any]:
        return {
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "n_positions": model.max_position_embeddings,
            "n_ctx": model.max_position_embeddings,
            "vocab_size": model.vocab_size,
            "activation_function": next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == model.activation),
            "embd_pdrop": model.embedding_dropout,
            "resid_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
            "layer_norm_epsilon": model.norm_eps,
            "initializer_range": model.initializer_range,
            "tie_word_embeddings": model.tie_embeddings,
        }

    def obstacle(self, model: GPTConfig) -> str | None:
        if model.width_base:
            return f"model.width_base {model.width_base}"
        return None if model.position_embedding == "learned" else "model.position_embedding rope"

    def rearranged(
        self, name: str, in_block: str, block: str, model: GPTConfig, shapes: hf.Shapes, present: Collection[str]
    ) -> list[hf.WeightMap]:
        """Map matrices stored as [in, out], and rows stored as all queries, all keys, all values."""
        if in_block in _TRANSPOSED:
            return [hf.WeightMap(name, shapes[name], (hf.SourceRows(block + _TRANSPOSED[in_block]),), transposed=True)]
        tensor = block + in_block.replace("attn.qkv", "attn.c_attn")
        sources = tuple(hf.SourceRows(tensor, model.head_dim, start * model.hidden_size) for start in range(3))
        return [hf.WeightMap(name, shapes[name], sources, transposed=in_block.endswith("weight"))]


TYPES: Final = (GPT2("gpt2", "gpt", "GPT2LMHeadModel", _NAMES, "transformer."),)
