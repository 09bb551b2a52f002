"""Files of settings as their makers published them, in the spellings of several years."""

import json
import tomllib
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface.hand_made import refused, write_llama
from threefold.config import ModelConfig
from threefold.errors import UserError
from threefold.huggingface.files import choose_type, left_out, read_model, write_model
from threefold.huggingface.mapping import huggingface_types
from threefold.models.gpt import GPTConfig
from threefold.models.llama import LlamaConfig

_DATA = Path(__file__).parent / "data"
PUBLISHED = json.loads((_DATA / "published.json").read_text(encoding="utf-8"))
_REFUSED = tomllib.loads((_DATA / "refused_configs.toml").read_text(encoding="utf-8"))["refused"]
LLAMA_3_1, QWEN3_MOE, MISTRAL, GPT_2, GEMMA_3, OLMO_3, GLM_4, DEEPSEEK_V2_LITE, DEEPSEEK_V3 = PUBLISHED.values()


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (
            LLAMA_3_1,
            {"num_key_value_heads": 8, "rope_theta": 5e5, "rope_scaling": "llama3", "rope_factor": 8.0,
             "rope_original_positions": 8192, "tie_embeddings": False, "norm_eps": 1e-5},
        ),
        (
            QWEN3_MOE,
            {"qk_norm": True, "num_experts": 128, "experts_per_token": 8, "expert_ffn_hidden_size": 768,
             "normalize_expert_weights": True, "moe_every": 1, "dense_layers": 0, "head_dim": 128},
        ),
        (MISTRAL, {"sliding_window": 4096, "full_attention_layers": 0, "head_dim": 128, "qkv_bias": False}),
        (GPT_2, {"architecture": "gpt", "ffn_hidden_size": 3072, "hidden_dropout": 0.1, "tie_embeddings": True}),
        (
            GEMMA_3,
            {"attention_pattern": "5 sliding : 1 full", "sliding_window": 512, "rope_theta": 1e6,
             "sliding_rope_theta": 1e4, "attention_scale": 0.0625, "qk_norm": True},
        ),
        (
            OLMO_3,
            {"architecture": "olmo", "attention_pattern": "3 sliding : 1 full", "sliding_rope_scaling": False,
             "rope_attention_factor": 1.2079441541679836, "sliding_rope_theta": 5e5, "qk_norm": True},
        ),
        (GLM_4, {"architecture": "glm", "rotary_share": 0.5, "qkv_bias": True, "norm_position": "both"}),
        (
            DEEPSEEK_V2_LITE,
            {"query_rank": 0, "key_value_rank": 512, "rope_mscale_all_dim": 0.707, "rope_attention_factor": 1.0,
             "router": "softmax", "shared_expert_ffn_hidden_size": 2816, "dense_layers": 1},
        ),
        (
            DEEPSEEK_V3,
            {"query_rank": 1536, "rope_mscale_all_dim": 1.0, "router": "sigmoid", "router_groups": 8,
             "router_groups_chosen": 4, "routed_scale": 2.5, "dense_layers": 3},
        ),
    ],
    ids=["llama 3.1", "qwen3 moe", "mistral", "gpt-2", "gemma 3", "olmo 3", "glm-4", "deepseek-v2-lite", "deepseek-v3"],
)  # fmt: skip
def test_published_files_are_read_and_come_back(published: dict[str, Any], expected: dict[str, Any]) -> None:
    family, settings = read_model(published, "config.json")
    assert {key: settings[key] for key in expected} == expected
    model = ModelConfig.model_validate(settings)
    filled = model.filled(1)
    model = ModelConfig.model_validate({**filled, **settings})
    assert choose_type(model, family.name) is family
    written = write_model(model, family, "bfloat16", None, published)
    said = {key: written[key] for key in published.keys() & written.keys() if key != "rope_scaling"}
    assert said == {key: published[key] for key in said}
    assert read_model(written, "config.json") == (family, settings)


def test_tokens_of_an_export_are_those_of_the_import_or_end_a_document() -> None:
    """A model of one's own ends its texts with the end-of-document token of its data; an import keeps its own."""
    family, settings = read_model(GPT_2, "config.json")
    model = ModelConfig.model_validate({**ModelConfig.model_validate(settings).filled(1), **settings})

    def tokens(eod: int | None, imported: dict[str, Any]) -> list[Any]:
        written = write_model(model, family, "float32", eod, imported)
        return [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")]

    assert tokens(7, {}) == [None, 7, None]
    assert tokens(7, {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}) == [1, [2, 3], 4]
    assert tokens(7, {"bos_token_id": 1, "eos_token_id": None}) == [1, 7, None]
    assert tokens(7, {"eos_token_id": 0}) == [None, 0, None]
    assert tokens(None, {}) == [None, None, None]


@pytest.mark.parametrize("case", _REFUSED, ids=[each["sentence"] for each in _REFUSED])
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path, case: dict[str, Any]) -> None:
    change = case["change"] | dict.fromkeys(case.get("null", ()))
    if (published := case.get("published")) is None:
        told = refused(write_llama(tmp_path / "hf", change), tmp_path / "run")
    else:
        with pytest.raises(UserError) as caught:
            read_model(PUBLISHED[published] | change, "config.json")
        told = str(caught.value)
    assert case["sentence"] in told


@pytest.mark.parametrize("changes", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 1, 2]}], ids=str)
def test_the_weight_of_load_balancing_is_that_of_transformers(changes: dict[str, Any]) -> None:
    """For an even load, where its mean over the layers with experts and our sum over them can be compared."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    family, settings = read_model(QWEN3_MOE | changes, "config.json")
    model = ModelConfig.model_validate(settings)
    sparse = sum(model.has_experts(layer) for layer in range(model.num_layers))
    assert sparse == 48 // changes.get("decoder_sparse_step", 1) - len(changes.get("mlp_only_layers", []))
    routers = tuple(torch.zeros(16, model.num_experts) for _ in range(sparse))
    theirs = 0.001 * modeling.load_balancing_loss_func(routers, model.num_experts, model.experts_per_token)
    assert sparse * settings["router_aux_loss"] == pytest.approx(float(theirs))
    filled = ModelConfig.model_validate({**model.filled(1), **settings})
    assert write_model(filled, family, "bfloat16", None, {})["router_aux_loss_coef"] == 0.001


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"activation_function": "relu2"}, {"activation": "relu2"}),
        ({"activation_function": "gelu_pytorch_tanh"}, {}),
        ({"activation_function": "gelu"}, {"activation": "gelu"}),
        ({"embd_pdrop": 0.3}, {"embedding_dropout": 0.3, "hidden_dropout": 0.1}),
        ({"resid_pdrop": 0.0}, {"embedding_dropout": 0.1, "hidden_dropout": 0.0}),
    ],
    ids=str,
)
def test_activation_function_and_dropout_of_embeddings(theirs: dict[str, Any], expected: dict[str, Any]) -> None:
    """Only what differs from the defaults is set; both ways."""
    family, settings = read_model(GPT_2 | theirs, "config.json")
    own = {key: settings[key] for key in ("activation", "embedding_dropout") if key in settings}
    assert own == {key: value for key, value in expected.items() if key != "hidden_dropout"}
    assert expected.items() <= settings.items()
    model = ModelConfig.model_validate({**ModelConfig.model_validate(settings).filled(1), **settings})
    written = write_model(model, family, "float32", None, {})
    assert read_model(written, "config.json") == (family, settings)
    for key in ("embd_pdrop", "resid_pdrop"):
        assert written[key] == (GPT_2 | theirs)[key]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        ({"type": "dynamic", "factor": 2}, {"rope_scaling": "dynamic", "rope_original_positions": 131072}),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            {"rope_attention_factor": pytest.approx(1.1386294), "rope_beta_fast": 32.0, "rope_beta_slow": 1.0},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.5},
            {"rope_attention_factor": 1.5, "rope_original_positions": 32768},
        ),
        (
            {
                "type": "su",  # of older files
                "short_factor": [1, 1.5],
                "long_factor": [2.0, 4.0],
                "original_max_position_embeddings": 8192,
            },
            {
                "rope_scaling": "longrope",
                "rope_factor": 16.0,
                "rope_attention_factor": pytest.approx(sqrt(1 + log(16) / log(8192))),
                "rope_short_factors": (1.0, 1.5),
                "rope_original_positions": 8192,
            },
        ),
    ],
)
def test_scalings_of_either_spelling(scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    old = LLAMA_3_1 | {"rope_scaling": scaling}
    new = {key: value for key, value in LLAMA_3_1.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**scaling, "rope_theta": 5e5}
    _, settings = read_model(old, "config.json")
    assert {key: settings[key] for key in expected} == expected
    assert read_model(new, "config.json")[1] == settings


def test_a_base_that_only_the_new_spelling_has_counts_beside_the_old_one() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    given = LLAMA_3_1 | {"rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 3e5}, "rope_theta": None}
    assert read_model(given, "config.json")[1]["rope_theta"] == 3e5
    assert read_model(given | {"rope_theta": 3e5}, "config.json")[1]["rope_theta"] == 3e5


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [
        (1, [], (1, 0)),
        (2, [], (2, 0)),
        (1, [0, 1, 2], (1, 3)),
        (2, [1], (2, 3)),
        (1, [3], None),
        (1, [1, 2], None),
        (50, [], None),
    ],
)
def test_layers_with_experts(step: int, dense: list[int], expected: tuple[int, int] | None) -> None:
    """The same layers have experts as in transformers, or the file is refused."""
    given = QWEN3_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": dense}
    if expected is None:
        with pytest.raises(UserError, match=r"mlp_only_layers|decoder_sparse_step"):
            read_model(given, "config.json")
        return
    _, settings = read_model(given, "config.json")
    assert (settings["moe_every"], settings["dense_layers"]) == expected
    model = ModelConfig.model_validate(settings)
    theirs = [layer not in dense and (layer + 1) % step == 0 for layer in range(6)]
    assert [model.has_experts(layer) for layer in range(6)] == theirs


def test_what_a_config_json_has_no_key_for_is_named() -> None:
    mixture = LlamaConfig(num_experts=8, hidden_dropout=0.1, router_z_loss=0.001, expert_capacity_factor=1.25)
    assert left_out(mixture, huggingface_types()["mixtral"]) == (
        "model.router_z_loss 0.001",
        "model.expert_capacity_factor 1.25",
        "model.hidden_dropout 0.1",
    )
    assert left_out(GPTConfig(hidden_dropout=0.1), huggingface_types()["gpt2"]) == ()


CHANGES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("norm_offset", "qkv_bias", "proj_bias", "qk_norm", "attention_gate", "attention_sinks"), (False, True)
    ),
    **dict.fromkeys(("router_bias", "expert_bias", "normalize_expert_weights", "tie_embeddings"), (False, True)),
    **dict.fromkeys(("embedding_scale", "logit_softcap", "attention_softcap", "attention_scale"), (3.0,)),
    **dict.fromkeys(("expert_gate_limit", "routed_scale", "sliding_rope_theta", "rope_mscale_all_dim"), (2.0,)),
    "norm_position": ("before", "after", "both"),
    "gate_activation": ("silu", "gelu", "gelu_tanh"),
    "attention_pattern": ("2 sliding : 1 full",),
    "sliding_window": (77,),
    "full_attention_layers": (2,),
    "rotary_share": (0.25, 1.0),
    "qk_norm_over": ("head", "width"),
    "router": ("softmax", "sigmoid", "softmax_chosen"),
    "router_bias_rate": (0.0, 0.1),
    "router_groups": (2,),
    "shared_expert_gate": (True,),
    "shared_expert_ffn_hidden_size": (0, 64),
    "query_rank": (0, 64),
}
"""Values of settings that change the logits of some type's models."""


@pytest.mark.parametrize("published", PUBLISHED)
def test_what_changes_the_logits_is_written_or_refused(published: str) -> None:
    """Each setting by itself: an export keeps it, or names it."""
    _, settings = read_model(PUBLISHED[published], "config.json")
    for name, value in ((name, value) for name, values in CHANGES.items() for value in values):
        changed = {**settings, name: value}
        model = ModelConfig.model_validate({**ModelConfig.model_validate(changed).filled(1), **changed})
        if any(model.broken_rules()):
            continue
        try:
            family = choose_type(model, None)
        except UserError:
            continue
        written = read_model(write_model(model, family, "float32", None, {}), "config.json")[1]
        again = ModelConfig.model_validate({**ModelConfig.model_validate(written).filled(1), **written})
        lost = {key for key in CHANGES if getattr(again, key, None) != getattr(model, key, None)} - {
            *family.training_only()
        }
        assert not lost, (name, value)
