"""The model that Megatron-LM's flags describe: each part of it is a flag there, a family here."""

import re
from typing import Any

from threefold.config.convert.key_mapping import Draft, Same, number, switch, text, whole

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


def fill_model(draft: Draft) -> None:
    """Choose the family and fill the section `model`."""
    draft.move(TABLE)
    llama = _is_llama(draft)
    draft.put("model.tie_embeddings", not draft.take("untie-embeddings-and-output-weights", switch, False))
    _ffn(draft, llama)
    _groups(draft, llama)
    if llama:
        draft.put("model.architecture", "llama")
        draft.move(FOR_LLAMA)
        _rope_scaling(draft)
        _experts(draft)
    else:
        head = draft.given.get("kv-channels")
        heads, hidden = (draft.settings.get(f"model.{key}") for key in ("num_attention_heads", "hidden_size"))
        if head is not None and heads and str(head).isdecimal() and int(head) * heads == hidden:
            del draft.given["kv-channels"]
        _leave(draft, [row.theirs for row in FOR_LLAMA], _LLAMA_ONLY, unsupported=True)
    if not draft.settings.get("model.num_experts"):
        _leave(draft, [row.theirs for row in FOR_EXPERTS], _NO_EXPERTS, unsupported=False)
        if draft.settings.pop("parallel.ep", 1) > 1:
            draft.note("expert-model-parallel-size", "above 1", "parallel.ep is 1: this model has no experts")


def _is_llama(draft: Draft) -> bool:
    """Whether norms and feed-forward are Llama's; what does not go with the family is told."""
    norm, swiglu = draft.take("normalization", text, "LayerNorm"), draft.take("swiglu", switch, False)
    position = draft.take("position-embedding-type", text, "learned_absolute")
    bare = draft.take("disable-bias-linear", switch, False)
    llama = norm == "RMSNorm" and swiglu
    rope = position == "rope"
    differing: list[tuple[str, Any, str]] = []
    if not llama:
        _differ(differing, norm != "LayerNorm", "normalization", norm, "gpt has layer norms")
        _differ(differing, swiglu, "swiglu", True, "gpt has GELU; with --normalization RMSNorm it would be llama")
        _differ(differing, bare, "disable-bias-linear", True, "gpt has biases")
        draft.put("model.position_embedding", "rope" if rope else "learned")
        _differ(differing, not rope and position != "learned_absolute", "position-embedding-type", position, "learned")
    else:
        _differ(differing, not rope, "position-embedding-type", position, "llama has rotary positions")
        _differ(differing, not bare, "disable-bias-linear", "not given", "llama has no biases")
    for key, value, reason in differing:
        draft.note(key, value, f"not convertible exactly: {reason}", unsupported=True)
    return llama


def _differ(found: list[tuple[str, Any, str]], differs: bool, key: str, value: Any, reason: str) -> None:
    if differs:
        found.append((key, value, reason))


def _ffn(draft: Draft, llama: bool) -> None:
    width, hidden = draft.take("ffn-hidden-size", whole), draft.settings.get("model.hidden_size")
    if width is None and llama and hidden is not None:
        width = int(4 * hidden * 2 / 3) // 64 * 64  # Megatron-LM's own default
    draft.put("model.ffn_hidden_size", width)


def _groups(draft: Draft, llama: bool) -> None:
    grouped, groups = draft.take("group-query-attention", switch, False), draft.take("num-query-groups", whole, 1)
    if grouped and llama:
        draft.put("model.num_key_value_heads", groups)
    elif grouped and groups != draft.settings.get("model.num_attention_heads"):
        draft.note("num-query-groups", groups, f"not convertible exactly: {_LLAMA_ONLY}", unsupported=True)
    elif groups != 1 and not grouped:
        draft.note("num-query-groups", groups, "Megatron-LM does not look at it without --group-query-attention")


def _experts(draft: Draft) -> None:
    if not draft.settings.get("model.num_experts"):
        return
    balancing = draft.take("moe-router-load-balancing-type", text, "aux_loss")
    draft.move(FOR_EXPERTS)
    if balancing == "none":
        draft.put("model.router_aux_loss", 0.0)
    elif balancing != "aux_loss":
        reason = "experts are balanced by model.router_aux_loss"
        draft.note("moe-router-load-balancing-type", balancing, reason, unsupported=True)
    if (factor := draft.settings.get("model.expert_capacity_factor")) is not None:
        draft.note(
            "moe-expert-capacity-factor", factor, "counts the tokens of each sequence, not of a rank's micro-batch"
        )
    if draft.take("moe-router-pre-softmax", switch, False):
        draft.put("model.normalize_expert_weights", False)
    every = draft.take("moe-layer-freq", text, "1")
    if every.isdecimal() and int(every) > 1:
        draft.put("model.moe_every", int(every))
        draft.note("moe-layer-freq", every, "the last layer of each run has experts, not the first")
    elif pattern := _layer_pattern(every, draft.settings.get("model.num_layers", 0)):
        draft.settings |= pattern
    elif every != "1":
        reason = "model.moe_every and model.dense_layers say which layers have experts"
        draft.note("moe-layer-freq", every, reason, unsupported=True)


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


def _rope_scaling(draft: Draft) -> None:
    """Llama 3.1's scaling, with the constants that Megatron-LM has for it."""
    factor = draft.take("rope-scaling-factor", number, 8.0)
    if draft.take("use-rope-scaling", switch, False):
        draft.settings |= {
            "model.rope_scaling": "llama3",
            "model.rope_factor": factor,
            "model.rope_original_positions": 8192,
            "model.rope_low_frequency_factor": 1.0,
            "model.rope_high_frequency_factor": 4.0,
        }


def _leave(draft: Draft, keys: list[str], reason: str, unsupported: bool) -> None:
    for key in keys:
        if key in draft.given:
            draft.note(key, draft.given.pop(key), reason, unsupported)
