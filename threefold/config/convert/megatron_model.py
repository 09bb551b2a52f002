"""Megatron-LM's model flags: chooses the family (gpt or llama) and converts the section `model`."""

import re
from typing import Any

from threefold.config.convert.key_mapping import KeyMapping, Same, number, switch, text, whole

TABLE = (
    Same("num-layers", "model.num_layers", whole),
    Same("hidden-size", "model.hidden_size", whole),
    Same("num-attention-heads", "model.num_attention_heads", whole),
    Same("max-position-embeddings", "model.max_position_embeddings", whole),
    Same("hidden-dropout", "model.hidden_dropout", number, 0.1),
    Same("attention-dropout", "model.attention_dropout", number, 0.1),
    Same("init-method-std", "model.initializer_range", number),
    Same("norm-epsilon", "model.norm_eps", number),
    Same("rotary-base", "model.rope_theta", number),
)
FOR_LLAMA = (
    Same("kv-channels", "model.head_dim", whole),
    Same("add-qkv-bias", "model.qkv_bias", switch),
    Same("qk-layernorm", "model.qk_norm", switch),
    Same("num-experts", "model.num_experts", whole),
)
FOR_EXPERTS = (
    Same("moe-router-topk", "model.experts_per_token", whole),
    Same("moe-ffn-hidden-size", "model.expert_ffn_hidden_size", whole),
    Same("moe-shared-expert-intermediate-size", "model.shared_expert_ffn_hidden_size", whole),
    Same("moe-shared-expert-gate", "model.shared_expert_gate", switch),
    Same("moe-aux-loss-coeff", "model.router_aux_loss", number),
    Same("moe-z-loss-coeff", "model.router_z_loss", number),
    Same("moe-expert-capacity-factor", "model.expert_capacity_factor", number),
)
_LLAMA_ONLY = "only architecture llama has it, which needs --normalization RMSNorm and --swiglu"
_NO_EXPERTS = "--num-experts is not given, so there are none"


def fill_model(mapping: KeyMapping) -> None:
    """Choose the family and fill the section `model`."""
    mapping.move(TABLE)
    llama = _is_llama(mapping)
    mapping.put("model.tie_embeddings", not mapping.take("untie-embeddings-and-output-weights", switch, False))
    _ffn(mapping, llama)
    _groups(mapping, llama)
    if llama:
        mapping.put("model.architecture", "llama")
        mapping.move(FOR_LLAMA)
        _rope_scaling(mapping)
        _experts(mapping)
    else:
        _activation(mapping)
        head = mapping.given.get("kv-channels")
        heads, hidden = (mapping.settings.get(f"model.{key}") for key in ("num_attention_heads", "hidden_size"))
        if head is not None and heads and str(head).isdecimal() and int(head) * heads == hidden:
            del mapping.given["kv-channels"]
        _leave(mapping, [row.theirs for row in FOR_LLAMA], _LLAMA_ONLY, unsupported=True)
    if not mapping.settings.get("model.num_experts"):
        _leave(mapping, [row.theirs for row in FOR_EXPERTS], _NO_EXPERTS, unsupported=False)
        if mapping.settings.pop("parallel.ep", 1) > 1:
            mapping.note("expert-model-parallel-size", "above 1", "parallel.ep is 1: this model has no experts")


def _is_llama(mapping: KeyMapping) -> bool:
    """Whether norms and feed-forward are Llama's; notes what does not fit the family."""
    norm, swiglu = mapping.take("normalization", text, "LayerNorm"), mapping.take("swiglu", switch, False)
    position = mapping.take("position-embedding-type", text, "learned_absolute")
    bare = mapping.take("disable-bias-linear", switch, False)
    llama = norm == "RMSNorm" and swiglu
    rope = position == "rope"
    differing: list[tuple[str, Any, str]] = []
    if not llama:
        _differ(differing, norm != "LayerNorm", "normalization", norm, "gpt has layer norms")
        _differ(differing, swiglu, "swiglu", True, "gpt has no gates; with --normalization RMSNorm it is llama")
        _differ(differing, bare, "disable-bias-linear", True, "gpt has biases")
        mapping.put("model.position_embedding", "rope" if rope else "learned")
        _differ(differing, not rope and position != "learned_absolute", "position-embedding-type", position, "learned")
    else:
        _differ(differing, not rope, "position-embedding-type", position, "llama has rotary positions")
        _differ(differing, not bare, "disable-bias-linear", "not given", "llama has no biases")
    for key, value, reason in differing:
        mapping.note(key, value, f"not convertible exactly: {reason}", unsupported=True)
    return llama


def _differ(found: list[tuple[str, Any, str]], differs: bool, key: str, value: Any, reason: str) -> None:
    if differs:
        found.append((key, value, reason))


def _activation(mapping: KeyMapping) -> None:
    """The activation function of a GPT: GELU fused with the bias is its tanh approximation, as OpenAI's is, and GELU
    without that fusion is exact."""
    squared, tanh = mapping.take("squared-relu", switch, False), mapping.take("openai-gelu", switch, False)
    exact = mapping.take("no-bias-gelu-fusion", switch, False)
    mapping.put("model.activation", "relu2" if squared else "gelu" if exact and not tanh else "gelu_tanh")


def _ffn(mapping: KeyMapping, llama: bool) -> None:
    width, hidden = mapping.take("ffn-hidden-size", whole), mapping.settings.get("model.hidden_size")
    if width is None and llama and hidden is not None:
        width = int(4 * hidden * 2 / 3) // 64 * 64  # Megatron-LM's own default
    mapping.put("model.ffn_hidden_size", width)


def _groups(mapping: KeyMapping, llama: bool) -> None:
    grouped, groups = mapping.take("group-query-attention", switch, False), mapping.take("num-query-groups", whole, 1)
    if grouped and llama:
        mapping.put("model.num_key_value_heads", groups)
    elif grouped and groups != mapping.settings.get("model.num_attention_heads"):
        mapping.note("num-query-groups", groups, f"not convertible exactly: {_LLAMA_ONLY}", unsupported=True)
    elif groups != 1 and not grouped:
        mapping.note("num-query-groups", groups, "Megatron-LM does not look at it without --group-query-attention")


def _experts(mapping: KeyMapping) -> None:
    if not mapping.settings.get("model.num_experts"):
        return
    balancing = mapping.take("moe-router-load-balancing-type", text, "aux_loss")
    mapping.move(FOR_EXPERTS)
    if balancing == "none":
        mapping.put("model.router_aux_loss", 0.0)
    elif balancing != "aux_loss":
        reason = "experts are balanced by model.router_aux_loss"
        mapping.note("moe-router-load-balancing-type", balancing, reason, unsupported=True)
    if (factor := mapping.settings.get("model.expert_capacity_factor")) is not None:
        mapping.note(
            "moe-expert-capacity-factor", factor, "counts the tokens of each sequence, not of a rank's micro-batch"
        )
    if mapping.take("moe-router-pre-softmax", switch, False):
        mapping.put("model.normalize_expert_weights", False)
    every = mapping.take("moe-layer-freq", text, "1")
    if every.isdecimal() and int(every) > 1:
        mapping.put("model.moe_every", int(every))
        mapping.note("moe-layer-freq", every, "the last layer of each run has experts, not the first")
    elif pattern := _layer_pattern(every, mapping.settings.get("model.num_layers", 0)):
        mapping.settings |= pattern
    elif every != "1":
        reason = "model.moe_every and model.dense_layers say which layers have experts"
        mapping.note("moe-layer-freq", every, reason, unsupported=True)


def _layer_pattern(text: str, layers: int) -> dict[str, int] | None:
    """Settings for a list such as `([0]*3+[1]*58)`, if only the first layers are dense."""
    parts = text.replace(" ", "").strip("()").split("+")
    found = [re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,6}))?", part) for part in parts]
    kinds: list[str] = []
    for each in found:
        if each is None:
            return None
        kinds += each[1].split(",") * min(int(each[2] or 1), 10_000)
    dense = kinds.index("1") if "1" in kinds else 0
    if len(kinds) != layers or "0" in kinds[dense:]:
        return None
    return {"model.dense_layers": dense} if dense else {"model.moe_every": 1}


def _rope_scaling(mapping: KeyMapping) -> None:
    """Llama 3.1's scaling, with the constants that Megatron-LM has for it."""
    factor = mapping.take("rope-scaling-factor", number, 8.0)
    if mapping.take("use-rope-scaling", switch, False):
        mapping.settings |= {
            "model.rope_scaling": "llama3",
            "model.rope_factor": factor,
            "model.rope_original_positions": 8192,
            "model.rope_low_frequency_factor": 1.0,
            "model.rope_high_frequency_factor": 4.0,
        }


def _leave(mapping: KeyMapping, keys: list[str], reason: str, unsupported: bool) -> None:
    for key in keys:
        if key in mapping.given:
            mapping.note(key, mapping.given.pop(key), reason, unsupported)
