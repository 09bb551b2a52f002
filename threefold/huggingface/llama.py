"""Llama and its successors in Hugging Face's format: keys of config.json and names of tensors.

Mistral, Qwen2 and Qwen3 add sliding windows, biases and QK-norm to Llama; Mixtral, Qwen2-MoE and Qwen3-MoE have
experts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from threefold.config import ModelConfig
from threefold.huggingface import mapping as hf
from threefold.models.layers.mixture_config import MixtureConfig
from threefold.models.llama import LlamaConfig

NAMES: Final = hf.TensorNames(
    outside={
        "embed.tokens.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.output.weight": "lm_head.weight",
    },
    in_block={
        "attn_norm.weight": "input_layernorm.weight",
        "attn.q_norm.weight": "self_attn.q_norm.weight",
        "attn.k_norm.weight": "self_attn.k_norm.weight",
        "attn.proj.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp.down.weight": "mlp.down_proj.weight",
        "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    },
    block="model.layers.{}.",
)
_GATE_UP: Final = {
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared.gate_up.weight": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
}
_MIXTRAL: Final = ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2"))
ONE_BY_ONE: Final = ("mlp.gate.weight", "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj"))
"""Names of the router, of an expert, and of its gate, up and down projections; in Qwen and DeepSeek."""
_WINDOWED: Final = ("mistral", "mixtral", "phi3")
"""Types whose `sliding_window` holds without `use_sliding_window`."""
_STACKED: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Names of stacked experts, gates before ups, as transformers 5 holds them in memory and some tools store them."""
DEFAULTS: Final[dict[str, Any]] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.001,
}
"""Values of keys that config.json lacks, in most of the types."""


@dataclass(frozen=True)
class LlamaType(hf.HuggingFaceType):
    """A `model_type` with Llama's architecture.

    A `window` may be in no layer, in all, in all but the first few, or by layer, where every `full_every`-th is full.
    With `fused`, the files hold queries, keys and values, or gates and ups, in one tensor each.
    """

    qkv_bias: tuple[bool, ...] = (False,)
    qk_norm: bool = False
    window: Literal["none", "all", "tail", "pattern"] = "none"
    full_every: int = 1
    fused: frozenset[str] = frozenset()
    pairs_neighbors: bool = False  # whether rotary pairs are neighboring features
    usual_share: float | None = None  # of a head that is rotated; None for a type without `partial_rotary_factor`
    by_kind: bool = False  # whether full and sliding layers have rotary positions of their own
    experts: bool = False
    shared: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings → values that the type stands for
    free: frozenset[str] = frozenset()  # settings that its config.json has keys for

    def read(self, given: hf.ConfigJson) -> dict[str, Any]:
        further = self._read_block(given)
        settings = read_decoder(given)
        hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
        layers, positions = settings["num_layers"], settings["max_position_embeddings"]
        if "head_dim" not in self.defaults and hidden % heads and not given.take("head_dim"):
            raise given.problem(
                f"hidden_size is {hidden}, no multiple of num_attention_heads {heads}", "give head_dim too"
            )
        settings |= {
            "num_key_value_heads": given.whole("num_key_value_heads", heads, least=1),
            "head_dim": given.whole("head_dim", hidden // heads, least=1),
            "qkv_bias": given.flag("qkv_bias", True) if self.name == "qwen2_moe" else self.qkv_bias[0],
            "qk_norm": self.qk_norm,
        }
        if self.by_kind:
            settings |= hf.read_rope_by_kind(given, positions, self.defaults["sliding_rope_theta"])
        else:
            settings |= hf.read_rope(given, positions, self.usual_share)
            if self.window == "pattern" and "rope_scaling" in settings:
                settings["sliding_rope_scaling"] = True
        settings |= self._read_window(given, layers) | further
        if self.by_kind and not settings.get("sliding_window"):
            del settings["sliding_rope_theta"], settings["sliding_rope_scaling"]
        return settings | (self._read_experts(given, layers) if self.experts else {})

    def _read_block(self, given: hf.ConfigJson) -> dict[str, Any]:
        """Return further settings of a block, after checks of those that this type has no settings for."""
        given.require("hidden_act", "silu", "swish")
        given.require("mlp_bias", False)
        given.require("attention_bias", False)  # in transformers, this also adds one to the output projection
        return {}

    def _read_window(self, given: hf.ConfigJson, layers: int) -> dict[str, Any]:
        if self.window == "none":
            return {}
        if self.window == "pattern":
            return self._read_pattern(given, layers)
        window = None if given.take("sliding_window") is None else given.whole("sliding_window")
        if self.name not in _WINDOWED and not given.flag("use_sliding_window"):
            window = None
        limit, kinds = given.whole("max_window_layers"), given.listed("layer_types", str)
        first_full = limit if self.window == "tail" else 0  # ignored by other types
        if not window:
            if kinds and hf.SLIDING in kinds:
                raise given.refuse(
                    "layer_types", kinds, "sliding attention with use_sliding_window and sliding_window alone"
                )
            return {}
        if kinds is None and self.name == "qwen2_moe":
            # As in transformers: every other one of the first layers.
            kinds = [hf.SLIDING if layer % 2 == 0 and layer < first_full else hf.FULL for layer in range(layers)]
        if kinds is not None:
            first_full = next((layer for layer, kind in enumerate(kinds) if kind != hf.FULL), layers)
            ordered = kinds == [hf.FULL] * first_full + [hf.SLIDING] * (layers - first_full)
            if not ordered or (self.window == "all" and first_full):
                raise given.refuse("layer_types", kinds, "full attention in the first layers and sliding in all others")
        if first_full >= layers:
            return {}
        return {"sliding_window": window, "full_attention_layers": first_full}

    def _read_pattern(self, given: hf.ConfigJson, layers: int) -> dict[str, Any]:
        every, kinds = given.whole("sliding_window_pattern", self.full_every, least=1), given.listed("layer_types", str)
        if kinds is None:
            kinds = [hf.SLIDING if (layer + 1) % every else hf.FULL for layer in range(layers)]
        if len(kinds) != layers or not {*kinds} <= {hf.FULL, hf.SLIDING}:
            raise given.refuse("layer_types", kinds, f"{hf.FULL} or {hf.SLIDING} for each of the {layers} layers")
        given.take("_sliding_window_pattern")  # of transformers, which writes layer_types beside it
        window = given.whole("sliding_window", 0)
        if hf.SLIDING not in kinds:
            return {}
        if not window:
            raise given.problem("sliding_window is missing and layer_types has sliding layers")
        return {"sliding_window": window, "attention_pattern": hf.pattern_of(kinds)}

    def _read_experts(self, given: hf.ConfigJson, layers: int) -> dict[str, Any]:
        given.require("router_jitter_noise", 0.0, None)
        key = "num_local_experts" if given.take("num_local_experts") else "num_experts"
        count = given.whole(key, least=1, most=hf.MOST_EXPERTS)
        given.agreed({name: given.given(name) or None for name in ("num_local_experts", "num_experts")})
        settings: dict[str, Any] = {
            "num_experts": count,
            "experts_per_token": given.whole("num_experts_per_tok", least=1),
        }
        sparse = layers
        if self.name == "mixtral":
            settings["normalize_expert_weights"] = True
            settings["expert_ffn_hidden_size"] = given.whole("intermediate_size", least=1)
        else:
            settings["expert_ffn_hidden_size"] = given.whole("moe_intermediate_size", least=1)
            settings["normalize_expert_weights"] = given.flag("norm_topk_prob")
            if self.shared:
                settings["shared_expert_ffn_hidden_size"] = given.whole("shared_expert_intermediate_size", least=1)
                settings["shared_expert_gate"] = True
            placed, sparse = _read_sparse_layers(given, layers)
            settings |= placed
        # Transformers averages over the layers with experts, and counts each of a token's experts as a whole.
        coefficient = float(given.number("router_aux_loss_coef"))
        return settings | {"router_aux_loss": coefficient * settings["experts_per_token"] / sparse}

    def write(self, model: LlamaConfig) -> dict[str, Any]:
        values = write_decoder(model) | {
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            **(hf.write_rope_by_kind(model) if self.by_kind else hf.write_rope(model)),
        }
        if self.usual_share is not None:
            values["partial_rotary_factor"] = model.rotary_share
            values["rope_parameters"] = {**values["rope_parameters"], "partial_rotary_factor": model.rotary_share}
        if self.name == "llama":
            values |= {"attention_bias": False, "mlp_bias": False}
        if self.name in ("qwen3", "qwen3_moe"):
            values["attention_bias"] = False
        if self.window != "none":
            values["sliding_window"] = model.sliding_window or None
            if self.name not in _WINDOWED and self.window != "pattern":
                values["use_sliding_window"] = model.sliding_window > 0
        if self.window in ("tail", "pattern"):
            windows = [model.window(layer) for layer in range(model.num_layers)]
            values["layer_types"] = [hf.SLIDING if window else hf.FULL for window in windows]
        if self.window == "tail":
            values["max_window_layers"] = model.full_attention_layers if model.sliding_window else model.num_layers
        return values | (self._write_experts(model) if self.experts else {})

    def _write_experts(self, model: LlamaConfig) -> dict[str, Any]:
        values = write_routing(model)
        if self.name == "mixtral":
            return values | {
                "num_local_experts": model.num_experts,
                "intermediate_size": model.expert_ffn_hidden_size,
                "router_jitter_noise": 0.0,
            }
        values |= {
            "num_experts": model.num_experts,
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "norm_topk_prob": model.normalize_expert_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.has_experts(layer)],
        }
        if self.shared:
            values["shared_expert_intermediate_size"] = model.shared_expert_ffn_hidden_size
        return values | ({"qkv_bias": model.qkv_bias} if self.name == "qwen2_moe" else {})

    def obstacle(self, model: LlamaConfig) -> str | None:
        found = {
            f"model.qkv_bias {str(model.qkv_bias).lower()}": model.qkv_bias in self.qkv_bias,
            f"model.qk_norm {str(model.qk_norm).lower()}": model.qk_norm == self.qk_norm,
            f"model.sliding_window {model.sliding_window}": not model.sliding_window or self.window != "none",
            f"model.full_attention_layers {model.full_attention_layers}": not model.sliding_window
            or not model.full_attention_layers
            or self.window in ("tail", "pattern"),
            f"model.num_experts {model.num_experts}": self.is_near(model),
        }
        if self.experts:
            shared, gate = model.shared_expert_ffn_hidden_size, model.shared_expert_gate
            found |= {
                f"model.shared_expert_ffn_hidden_size {shared}": (shared > 0) == self.shared,
                f"model.shared_expert_gate {str(gate).lower()}": not shared or gate,
            }
        if self.name == "mixtral":
            every = all(model.has_experts(layer) for layer in range(model.num_layers))
            found |= {
                "model.normalize_expert_weights false": model.normalize_expert_weights,
                f"model.moe_every {model.moe_every} and model.dense_layers {model.dense_layers}": every,
            }
        # All others of a block are as in Llama.
        usual = {name: given.default for name, given in LlamaConfig.model_fields.items()} | LlamaConfig.filled(model, 0)
        without = {*self.free, *self.training_only(), *dict(model.unused())}
        for name in sorted(LlamaConfig.unlisted - ModelConfig.unlisted - without):
            value = getattr(model, name)
            shown = str(value).lower() if isinstance(value, bool) else value
            found[f"model.{name} {shown}"] = value == {**usual, **self.fixed}[name]
        return next((setting for setting, fits in found.items() if not fits), None)

    def is_near(self, model: LlamaConfig) -> bool:
        return self.experts == (model.num_experts > 0)

    def training_only(self) -> tuple[str, ...]:
        return ("router_z_loss", "router_sequence_loss", "expert_capacity_factor", "hidden_dropout")

    def rearranged(
        self, name: str, in_block: str, block: str, model: LlamaConfig, shapes: hf.Shapes, present: Collection[str]
    ) -> list[hf.WeightMap]:
        """Map gates interleaved with ups; queries, keys and values by key-value head (GQA); experts one by one."""
        if in_block in _GATE_UP:
            sources = [hf.SourceRows(block + tensor) for tensor in _GATE_UP[in_block]]
            if "gate_up" in self.fused:
                both = block + "mlp.gate_up_proj.weight"
                sources = [hf.SourceRows(both), hf.SourceRows(both, start=shapes[name][0] // 2)]
            return [hf.interleaved(name, shapes[name], sources)]
        if in_block.startswith("attn.qkv."):
            return [self._heads(name, f"{block}self_attn.{{}}_proj.{in_block.rpartition('.')[2]}", model, shapes)]
        names = _MIXTRAL if self.name == "mixtral" else ONE_BY_ONE
        return map_experts(name, in_block, block, shapes, present, names)

    def _heads(self, name: str, tensor: str, model: LlamaConfig, shapes: hf.Shapes) -> hf.WeightMap:
        heads, groups, width = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        served = heads // groups
        rows = {"q": served * width, "k": width, "v": width}
        sources = [hf.SourceRows(tensor.format(each), count) for each, count in rows.items()]
        if "qkv" in self.fused:
            starts = (0, heads * width, (heads + groups) * width)
            counts = zip(rows.values(), starts, strict=True)
            sources = [hf.SourceRows(tensor.format("qkv"), count, start) for count, start in counts]
        order: list[int] = []
        if self.pairs_neighbors:  # ours are a feature of the first and one of the second half of those rotated
            turned = model.rotary_dim
            head = [*hf.halves(turned // 2), *range(turned, width)]
            order = [each * width + place for each in range(served + 1) for place in head]
            order += range(len(order), len(order) + width)
        return hf.WeightMap(name, shapes[name], tuple(sources), order=tuple(order))


def read_decoder(given: hf.ConfigJson) -> dict[str, Any]:
    """Return the settings that config.json has in all types of Llama's form, whatever their attention."""
    return {
        "num_layers": given.whole("num_hidden_layers", least=1, most=hf.MOST_LAYERS),
        "hidden_size": given.whole("hidden_size", least=1),
        "num_attention_heads": given.whole("num_attention_heads", least=1),
        "ffn_hidden_size": given.whole("intermediate_size", least=1),
        "vocab_size": given.whole("vocab_size", least=1),
        "max_position_embeddings": given.whole("max_position_embeddings", least=1),
        "attention_dropout": float(given.number("attention_dropout")),
        "norm_eps": float(given.number("rms_norm_eps")),
        "initializer_range": float(given.number("initializer_range")),
        "tie_embeddings": given.flag("tie_word_embeddings"),
    }


def write_decoder(model: MixtureConfig) -> dict[str, Any]:
    """Return the keys of config.json for the settings of `read_decoder`."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "attention_dropout": model.attention_dropout,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
    }


def write_routing(model: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a router that config.json has in all types with experts."""
    sparse = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return {
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": float(f"{model.router_aux_loss * sparse / model.experts_per_token:.12g}"),
        "output_router_logits": False,
    }


def map_experts(
    name: str,
    in_block: str,
    block: str,
    shapes: hf.Shapes,
    present: Collection[str],
    names: tuple[str, str, tuple[str, str, str]] = ONE_BY_ONE,
) -> list[hf.WeightMap]:
    """Map the router, or stacked experts: one by one, or as stacks if these are `present`."""
    router, expert, (gate, up, down) = names
    stacked = block + _STACKED[0] in present
    if in_block == "mlp.router.weight":
        named = block + router
        return [hf.copied(name, block + ONE_BY_ONE[0] if stacked and named not in present else named, shapes)]
    count, *shape = shapes[name]
    maps = []
    for number in range(count):
        matrices = block + expert.format(number)
        if in_block == "mlp.experts.gate_up" and stacked:
            both = block + _STACKED[0]
            sources = [hf.SourceRows(both, 1, 0, number), hf.SourceRows(both, 1, shape[0] // 2, number)]
        elif in_block == "mlp.experts.gate_up":
            sources = [hf.SourceRows(f"{matrices}{gate}.weight"), hf.SourceRows(f"{matrices}{up}.weight")]
        elif stacked:
            sources = [hf.SourceRows(block + _STACKED[1], 1, 0, number)]
        else:
            sources = [hf.SourceRows(f"{matrices}{down}.weight")]
        maps.append(hf.interleaved(name, shape, sources, number))
    return maps


def _read_sparse_layers(given: hf.ConfigJson, layers: int) -> tuple[dict[str, int], int]:
    """Return the `moe_every` and `dense_layers` that give experts to the same layers, and the number of these."""
    step, dense = given.whole("decoder_sparse_step", 1, least=1), set(given.listed("mlp_only_layers", int) or [])
    wanted = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(wanted):
        raise given.refuse("decoder_sparse_step", step, "experts in one layer at least for this family")
    first = wanted.index(True)
    for every in range(1, min(layers, first + 1) + 1):
        for skipped in (0, first):
            if wanted == [layer >= skipped and (layer + 1) % every == 0 for layer in range(layers)]:
                return {"moe_every": every, "dense_layers": skipped}, sum(wanted)
    raise given.refuse("mlp_only_layers", sorted(dense), "experts in every n-th layer after the first dense ones")


def _type(name: str, head: str, defaults: dict[str, Any], **differences: Any) -> LlamaType:
    return LlamaType(name, "llama", head, NAMES, defaults=DEFAULTS | defaults, **differences)


@dataclass(frozen=True)
class PhiType(LlamaType):
    """Phi-3 and Phi-4: Llama with fused tensors, and rotary positions in a share of each head."""

    def _read_block(self, given: hf.ConfigJson) -> dict[str, Any]:
        for key in ("resid_pdrop", "embd_pdrop"):
            given.require(key, 0.0)
        given.take("original_max_position_embeddings")  # of `longrope` alone
        return super()._read_block(given)

    def write(self, model: LlamaConfig) -> dict[str, Any]:
        written = super().write(model)
        scaled = model.rope_scaling == "longrope"
        original = model.rope_original_positions if scaled else model.max_position_embeddings
        return written | {"original_max_position_embeddings": original}


TYPES: Final = (
    _type("llama", "LlamaForCausalLM", {"max_position_embeddings": 2048}),
    _type(
        "mistral",
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window="all",
    ),
    _type("qwen2", "Qwen2ForCausalLM", {"sliding_window": 4096}, qkv_bias=(True,), window="tail"),
    _type("qwen3", "Qwen3ForCausalLM", {"head_dim": 128, "sliding_window": 4096}, qk_norm=True, window="tail"),
    _type(
        "mixtral",
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        window="all",
        experts=True,
    ),
    _type(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            "sliding_window": 4096,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias=(True, False),
        window="tail",
        experts=True,
        shared=True,
    ),
    _type(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm=True,
        window="all",
        experts=True,
    ),
    PhiType(
        "phi3",
        "llama",
        "Phi3ForCausalLM",
        NAMES,
        defaults=DEFAULTS
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        window="all",
        fused=frozenset(("qkv", "gate_up")),
        usual_share=1.0,
        free=frozenset(("rotary_share",)),
    ),
)
