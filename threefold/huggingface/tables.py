"""Which tensors of the files make up which of ours, for each family."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from threefold.config import ModelConfig
from threefold.huggingface.families import Family
from threefold.huggingface.weights import Part, Weight, dealt

Shapes = Mapping[str, tuple[int, ...]]

_GPT_PLAIN: Final = {
    "embed.tokens.weight": "transformer.wte.weight",
    "embed.positions.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": "lm_head.weight",
}
_GPT_BLOCK: Final = {
    "attn_norm.weight": "ln_1.weight",
    "attn_norm.bias": "ln_1.bias",
    "attn.proj.bias": "attn.c_proj.bias",
    "mlp_norm.weight": "ln_2.weight",
    "mlp_norm.bias": "ln_2.bias",
    "mlp.up.bias": "mlp.c_fc.bias",
    "mlp.down.bias": "mlp.c_proj.bias",
}
_GPT_TRANSPOSED: Final = {
    "attn.proj.weight": "attn.c_proj.weight",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.down.weight": "mlp.c_proj.weight",
}
"""Held as [in, out], as are the queries, keys and values."""

_LLAMA_PLAIN: Final = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_LLAMA_BLOCK: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.proj.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
}
_GATE_UP: Final = {
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared.gate_up.weight": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
}
_MIXTRAL: Final = ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2"))
_QWEN: Final = ("mlp.gate.weight", "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj"))
"""Names of the router, of an expert, and of its gate, up and down projections."""
_STACKED: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""How transformers 5 has all experts in memory, gates before ups, and how some tools store them."""
_GPT: Final = (_GPT_PLAIN, _GPT_BLOCK, "transformer.h.{}.")
_LLAMA: Final = (_LLAMA_PLAIN, _LLAMA_BLOCK, "model.layers.{}.")
"""Names of what is held as ours is: outside the blocks, and in them; and what the latter begin with."""


def weights_of(family: Family, model: ModelConfig, shapes: Shapes, present: Collection[str] = ()) -> list[Weight]:
    """Every weight of a model, in the order of its layers.

    Args:
        family: whose names are used.
        model: resolved.
        shapes: of our parameters, by name.
        present: names in the files, which tell how experts are stored; one by one where it is empty.
    """
    plain, in_block, blocks = _GPT if family.architecture == "gpt" else _LLAMA
    weights: list[Weight] = []
    for name in shapes:
        if name in plain:
            weights.append(_plain(name, plain[name], shapes))
            continue
        _, layer, ours = name.split(".", 2)
        block = blocks.format(layer)
        if ours in in_block:
            weights.append(_plain(name, block + in_block[ours], shapes))
        elif family.architecture == "gpt":
            weights.append(_gpt(name, ours, block, model, shapes))
        else:
            weights += _llama(name, ours, block, family, model, shapes, present)
    return weights


def _gpt(name: str, ours: str, block: str, model: ModelConfig, shapes: Shapes) -> Weight:
    if ours in _GPT_TRANSPOSED:
        return Weight(name, shapes[name], (Part(block + _GPT_TRANSPOSED[ours]),), transposed=True)
    theirs = block + ours.replace("attn.qkv", "attn.c_attn")
    width = model.hidden_size // model.num_attention_heads
    parts = tuple(Part(theirs, width, start * model.hidden_size) for start in range(3))
    return Weight(name, shapes[name], parts, transposed=ours.endswith("weight"))


def _llama(
    name: str, ours: str, block: str, family: Family, model: ModelConfig, shapes: Shapes, present: Collection[str]
) -> list[Weight]:
    if ours in _GATE_UP:
        return [dealt(name, shapes[name], [Part(block + theirs) for theirs in _GATE_UP[ours]])]
    if not ours.startswith("attn.qkv."):
        return list(_experts(name, ours, block, family, shapes, present))
    kind = ours.rpartition(".")[2]
    shared, width = model.num_attention_heads // model.num_key_value_heads, model.head_dim
    rows = {"q": shared * width, "k": width, "v": width}
    parts = [Part(f"{block}self_attn.{each}_proj.{kind}", count) for each, count in rows.items()]
    return [dealt(name, shapes[name], parts)]


def _experts(
    name: str, ours: str, block: str, family: Family, shapes: Shapes, present: Collection[str]
) -> Iterator[Weight]:
    router, expert, (gate, up, down) = _MIXTRAL if family.name == "mixtral" else _QWEN
    stacked = block + _STACKED[0] in present
    if ours == "mlp.router.weight":
        named = block + router
        yield _plain(name, block + _QWEN[0] if stacked and named not in present else named, shapes)
        return
    count, *shape = shapes[name]
    for number in range(count):
        own = block + expert.format(number)
        if ours == "mlp.experts.gate_up" and stacked:
            both = block + _STACKED[0]
            parts = [Part(both, 1, 0, number), Part(both, 1, shape[0] // 2, number)]
        elif ours == "mlp.experts.gate_up":
            parts = [Part(f"{own}{gate}.weight"), Part(f"{own}{up}.weight")]
        elif stacked:
            parts = [Part(block + _STACKED[1], 1, 0, number)]
        else:
            parts = [Part(f"{own}{down}.weight")]
        yield dealt(name, shape, parts, number)


def _plain(name: str, theirs: str, shapes: Shapes) -> Weight:
    return Weight(name, shapes[name], (Part(theirs),))
