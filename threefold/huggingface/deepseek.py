"""DeepSeek-V2 and V3 in Hugging Face's format: keys of config.json and names of tensors.

Their rotary pairs are interleaved; the rows of queries and keys are rearranged, so that the model turns halves.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log
from typing import Any, Final

from threefold.config import ModelConfig
from threefold.huggingface import mapping as hf
from threefold.huggingface.llama import NAMES, map_experts, read_decoder, write_decoder
from threefold.models.deepseek import DeepseekConfig

_NAMES: Final = NAMES.with_others(
    {
        "attn.q_down.weight": "self_attn.q_a_proj.weight",
        "attn.q_norm.weight": "self_attn.q_a_layernorm.weight",
        "attn.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attn.kv.weight": "self_attn.kv_b_proj.weight",
        "mlp.shared.down.weight": "mlp.shared_experts.down_proj.weight",
        "mlp.routing.bias": "mlp.gate.e_score_correction_bias",
    }
)
_GATE_UP: Final = {
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
}
_FURTHER: Final = {
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "join.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
"""Names in a module of multi-token prediction besides those of its block, which files hold as a further layer."""
_SHARED: Final = {"embed.tokens.weight": "embed_tokens.weight", "head.output.weight": "shared_head.head.weight"}
"""Tensors of the whole model that published files repeat in these modules."""
_DEFAULTS: Final[dict[str, Any]] = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""Values of keys that config.json lacks, in both types."""


@dataclass(frozen=True)
class DeepseekType(hf.HuggingFaceType):
    """A `model_type` with latent attention; its experts are chosen by `scoring` and the methods `choosing`."""

    scoring: str = "softmax"
    choosing: tuple[str, ...] = ("greedy", "group_limited_greedy")

    def read(self, given: hf.ConfigJson) -> dict[str, Any]:
        given.require("hidden_act", "silu", "swish")
        given.require("attention_bias", False)
        given.require("mlp_bias", False)
        given.require("rope_interleave", True)
        settings = read_decoder(given)
        heads = settings["num_attention_heads"]
        if (groups := given.whole("num_key_value_heads", heads)) != heads:
            raise given.refuse("num_key_value_heads", groups, "latent attention with num_attention_heads alone")
        plain, rope = given.whole("qk_nope_head_dim", least=1), given.whole("qk_rope_head_dim", least=2)
        for key, width in (("head_dim", rope), ("qk_head_dim", plain + rope)):  # which transformers adds
            given.agreed(
                {key: given.given(key), "the sum of its parts" if key != "head_dim" else "qk_rope_head_dim": width}
            )
        settings |= {
            "query_rank": 0 if given.take("q_lora_rank") is None else given.whole("q_lora_rank", least=1),
            "key_value_rank": given.whole("kv_lora_rank", least=1),
            "plain_head_dim": plain,
            "rope_head_dim": rope,
            "value_head_dim": given.whole("v_head_dim", least=1),
            **hf.read_rope(given, settings["max_position_embeddings"]),
        }
        scaling = given.take("rope_parameters") or given.take("rope_scaling") or {}
        if settings.get("rope_scaling") == "yarn":
            settings["rope_mscale_all_dim"] = float(scaling.get("mscale_all_dim") or 0)
        return settings | self._read_experts(given, settings["num_layers"])

    def _read_experts(self, given: hf.ConfigJson, layers: int) -> dict[str, Any]:
        # The weight of a loss that transformers does not compute, and numbers of ranks.
        for key in ("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "num_nextn_predict_layers"):
            given.take(key)
        further = given.whole("num_nextn_predict_layers", 0, most=64) if self.scoring == "sigmoid" else 0
        given.require("scoring_func", self.scoring)
        given.require("moe_layer_freq", 1)
        dense = given.whole("first_k_dense_replace", 0)
        count = given.whole("n_routed_experts", least=1, most=hf.MOST_EXPERTS)
        inner = given.whole("moe_intermediate_size")
        shared, chosen = given.whole("n_shared_experts", least=1), given.whole("num_experts_per_tok", least=1)
        method = given.take("topk_method", self.choosing[0])
        given.require("topk_method", *self.choosing)
        groups = given.whole("n_group", 1, least=1) if method != "greedy" else 1
        best, scale = given.whole("topk_group", 1, least=1), float(given.number("routed_scaling_factor"))
        normalizes = given.flag("norm_topk_prob")
        if self.scoring == "softmax" and normalizes:
            raise given.refuse("norm_topk_prob", True, "norm_topk_prob false alone, as transformers ignores it")
        given.take("n_group")
        if dense >= layers:
            return {}
        return {
            "num_experts": count,
            "experts_per_token": chosen,
            "expert_ffn_hidden_size": inner,
            "shared_expert_ffn_hidden_size": shared * inner,
            "normalize_expert_weights": normalizes,
            "dense_layers": dense,
            "router": self.scoring,
            "router_bias_rate": 0.0,  # biases stay, as in transformers
            "routed_scale": scale,
            **({"router_groups": groups, "router_groups_chosen": best} if groups > 1 else {}),
            **({"mtp_layers": further} if further else {}),
        }

    def settled(
        self, settings: dict[str, Any], tensors: Collection[str], ignored: Collection[str] = ()
    ) -> dict[str, Any]:
        """Leave out multi-token prediction if the user does, or the files, as those that transformers writes."""
        module = self.names.block.format(settings["num_layers"])
        if "num_nextn_predict_layers" in ignored or not any(name.startswith(module) for name in tensors):
            return {name: value for name, value in settings.items() if name != "mtp_layers"}
        return settings

    def write(self, model: DeepseekConfig) -> dict[str, Any]:
        inner, shared = model.expert_ffn_hidden_size, model.shared_expert_ffn_hidden_size
        grouped = model.router_groups > 1
        values = write_decoder(model) | {
            "num_key_value_heads": model.num_attention_heads,
            "q_lora_rank": model.query_rank or None,
            "kv_lora_rank": model.key_value_rank,
            "qk_nope_head_dim": model.plain_head_dim,
            "qk_rope_head_dim": model.rope_head_dim,
            "v_head_dim": model.value_head_dim,
            "attention_bias": False,
            **self._write_rope(model),
            "first_k_dense_replace": model.dense_layers if model.num_experts else model.num_layers,
            "moe_layer_freq": 1,
            "n_routed_experts": model.num_experts or 1,
            "n_shared_experts": shared // inner if model.num_experts else 1,
            "num_experts_per_tok": model.experts_per_token if model.num_experts else 1,
            "moe_intermediate_size": inner,
            "norm_topk_prob": model.normalize_expert_weights if model.num_experts else False,
            "scoring_func": self.scoring,
            "topk_method": self.choosing[-1 if grouped else 0],
            "n_group": model.router_groups or 1,
            "topk_group": model.router_groups_chosen if grouped else 1,
            "routed_scaling_factor": model.routed_scale,
        }
        if self.scoring == "sigmoid":
            values |= {"rope_interleave": True, "num_nextn_predict_layers": model.mtp_layers}
        return values

    def _write_rope(self, model: DeepseekConfig) -> dict[str, Any]:
        keys = hf.write_rope(model)
        if model.rope_scaling == "yarn":
            # DeepSeek's own code knows the factor of queries and keys as a ratio that these two give.
            growth, under = 0.1 * log(model.rope_factor), model.rope_mscale_all_dim
            ratio = model.rope_attention_factor * (growth * under + 1)
            factors = {"mscale": float(f"{(ratio - 1) / growth if growth else 1.0:.12g}"), "mscale_all_dim": under}
            keys |= {key: keys[key] | factors for key in ("rope_scaling", "rope_parameters")}
        return keys

    def obstacle(self, model: DeepseekConfig) -> str | None:
        further = f"model.mtp_layers {model.mtp_layers}"
        if not model.num_experts:
            return further if model.mtp_layers else None
        shared, inner = model.shared_expert_ffn_hidden_size, model.expert_ffn_hidden_size
        normalizes, softmax = model.normalize_expert_weights, self.scoring == "softmax"
        found = {
            f"model.router {model.router}": model.router == self.scoring,
            f"model.router_bias_rate {model.router_bias_rate:g}": self.scoring != "softmax"
            or not model.has_expert_bias,
            f"model.shared_expert_ffn_hidden_size {shared}": shared > 0 and shared % inner == 0,
            "model.shared_expert_gate true": not model.shared_expert_gate,
            further: self.scoring == "sigmoid" or not model.mtp_layers,
            "model.router_bias true": not model.router_bias,
            "model.expert_bias true": not model.expert_bias,
            f"model.expert_gate_limit {model.expert_gate_limit:g}": not model.expert_gate_limit,
            f"model.moe_every {model.moe_every}": model.moe_every == 1,
            f"model.normalize_expert_weights {str(normalizes).lower()}": not (softmax and normalizes),
        }
        return next((setting for setting, fits in found.items() if not fits), None)

    def training_only(self) -> tuple[str, ...]:
        losses = ("router_aux_loss", "router_z_loss", "router_sequence_loss", "router_bias_rate", "mtp_loss")
        return (*losses, "expert_capacity_factor", "hidden_dropout")

    def leaves_out(self, tensor: str, model: DeepseekConfig, values: Mapping[str, Any]) -> bool:
        """Return whether a tensor is of multi-token prediction that is left out."""
        further = 0 if model.mtp_layers else values.get("num_nextn_predict_layers") or 0
        layers = range(model.num_layers, model.num_layers + further)
        return any(tensor.startswith(self.names.block.format(layer)) for layer in layers)

    def repeated(self, model: DeepseekConfig) -> dict[str, hf.Repeated]:
        """Return the tensors of the whole model that modules of multi-token prediction repeat."""
        because = f"num_nextn_predict_layers {model.mtp_layers}"
        remedy = "give --ignore num_nextn_predict_layers to leave out these layers"
        layers = range(model.num_layers, model.num_layers + model.mtp_layers)
        modules = {
            self.names.block.format(layer) + tensor: hf.Repeated(name, because, remedy)
            for layer in layers
            for name, tensor in _SHARED.items()
        }
        return super().repeated(model) | modules

    def weights(self, model: ModelConfig, shapes: hf.Shapes, present: Collection[str] = ()) -> list[hf.WeightMap]:
        """Map every parameter, those of multi-token prediction to further layers."""
        inner = {name: name.removeprefix("head.depths.").split(".", 1) for name in shapes}
        further = {name: parts for name, parts in inner.items() if name.startswith("head.depths.")}
        maps = super().weights(model, {name: shapes[name] for name in shapes if name not in further}, present)
        for name, (depth, rest) in further.items():
            block = self.names.block.format(model.num_layers + int(depth))
            if rest in _FURTHER:
                maps.append(hf.copied(name, block + _FURTHER[rest], shapes))
            else:
                maps += self.of_block(name, rest.removeprefix("block."), block, model, shapes, present)
        repeated = {} if present else {name: tensor for name, tensor in _SHARED.items() if name in shapes}
        for layer in range(model.num_layers, model.num_layers + model.mtp_layers):
            block = self.names.block.format(layer)
            maps += [hf.copied(name, block + tensor, shapes) for name, tensor in repeated.items()]
        return maps

    def rearranged(
        self, name: str, in_block: str, block: str, model: DeepseekConfig, shapes: hf.Shapes, present: Collection[str]
    ) -> list[hf.WeightMap]:
        """Map gates interleaved with ups, rotary pairs that become halves, and experts one by one."""
        if in_block in _GATE_UP:
            sources = [hf.SourceRows(block + tensor) for tensor in _GATE_UP[in_block]]
            return [hf.interleaved(name, shapes[name], sources)]
        if in_block in ("attn.q.weight", "attn.kv_down.weight"):
            of_queries = "q_b_proj" if model.query_rank else "q_proj"
            tensor, plain = ("kv_a_proj_with_mqa", model.key_value_rank)
            if in_block == "attn.q.weight":
                tensor, plain = of_queries, model.plain_head_dim
            order = hf.halves(model.rope_head_dim // 2, plain)
            sources = [hf.SourceRows(f"{block}self_attn.{tensor}.weight", len(order))]
            return [hf.WeightMap(name, shapes[name], tuple(sources), order=order)]
        return map_experts(name, in_block, block, shapes, present)


TYPES: Final = (
    DeepseekType(
        "deepseek_v3",
        "deepseek",
        "DeepseekV3ForCausalLM",
        _NAMES,
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        scoring="sigmoid",
        choosing=("noaux_tc",),
    ),
    DeepseekType(
        "deepseek_v2",
        "deepseek",
        "DeepseekV2ForCausalLM",
        _NAMES,
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
        },
    ),
)
