"""Adapters to and from the package `peft`: the same logits, and the same merged weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.huggingface.hand_made import EXPERTS, GPT, SIZES, stored
from tests.support.command import Silent
from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import carried_by, newest, stored_config
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import save_checkpoint
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.huggingface.export_hf import Export, export_model
from threefold.huggingface.import_hf import Import, import_model
from threefold.huggingface.peft_format import export_adapter
from threefold.inference.model import Trained
from threefold.models.source import ConfigSource
from threefold.train.state import checkpoint_tensors, load_weights
from threefold.train.step import Engine

pytestmark = pytest.mark.slow
LENGTH = 24
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "llama": ("llama", SIZES, {}, {"tp": 2}),
    "some projections": (
        "qwen2",
        SIZES,
        {"targets": ["blocks.*.attn.qkv.query", "blocks.*.attn.qkv.value", "blocks.1.mlp.gate_up.up", "head.output"]},
        {"pp": 2},
    ),
    "qwen3": ("qwen3", SIZES | {"head_dim": 8}, {"rank_stabilized": True}, {"dp": 2, "zero": 3}),
    "pairs": ("glm", SIZES | {"head_dim": 8, "pad_token_id": 0}, {}, {"tp": 2}),
    "fused": ("phi3", SIZES | {"pad_token_id": 0}, {"rank_stabilized": True}, {}),
    "gpt2": ("gpt2", GPT | {"tie_word_embeddings": False}, {"targets": ["blocks.**", "embed.tokens"]}, {"tp": 2}),
    "magnitudes": ("qwen2", SIZES, {"dora": True, "targets": ["blocks.**", "head.output"]}, {"tp": 2}),
    "magnitudes of some": (
        "phi3",
        SIZES | {"pad_token_id": 0},
        {"dora": True, "rank_stabilized": True, "targets": ["blocks.*.attn.qkv.query", "blocks.*.mlp.**"]},
        {"pp": 2},
    ),
    "magnitudes of pairs": ("glm", SIZES | {"head_dim": 8, "pad_token_id": 0}, {"dora": True}, {"dp": 2, "zero": 3}),
    "magnitudes of gpt2": ("gpt2", GPT | {"tie_word_embeddings": False}, {"dora": True}, {"tp": 2}),
    "shared expert": (
        "qwen2_moe",
        SIZES | EXPERTS | {"shared_expert_intermediate_size": 20},
        {"targets": ["blocks.*.attn.**", "blocks.*.mlp.shared.**"]},
        {"tp": 2},
    ),
}


def transformer(kind: str, sizes: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()


def tuned_config(start: Path, adapter: dict[str, Any], layout: dict[str, int]) -> Config:
    model = stored_config(newest(start).path).model
    sections = {
        "data": {"path": "none", "sequence_length": LENGTH},
        "model": model.settings(),
        "parallel": layout,
        "adapter": {"rank": 3, "alpha": 7.0, **adapter},
        "optimizer": {"lr": 0.05, "warmup_steps": 0},
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "max_steps": 3},
    }
    return resolve(config_of(sections), 1)


def tune(start: Path, run: Path, config: Config) -> None:
    """Train adapters of a run's model in a layout for two steps, on random tokens, and save a checkpoint."""
    mesh = Mesh(Layout.from_config(config.parallel))
    make, plan = ConfigSource().load(config)
    engine = Engine(make, plan, mesh, config)
    load_weights(engine, newest(start))
    rows = torch.arange(4 // mesh.dp.size) + mesh.dp.index * (4 // mesh.dp.size)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(1, config.model.vocab_size, (4, LENGTH + 1), generator=generator)
        engine.train_step(Batch(tokens[rows, :-1], tokens[rows, 1:], rows, None), step)
    texts = {**carried_by(newest(start).path), "config.yaml": config.to_yaml()}
    facts = Facts(2, 8, 11, None, None, 0, 0)
    save_checkpoint(run, facts, checkpoint_tensors(engine), texts, mesh.world)


@pytest.fixture
def made(pool, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path, nn.Module]:
    """Return a folder of Hugging Face, a run with adapters of its model, and the model in transformers."""
    kind, sizes, adapter, layout = MODELS[request.param]
    model = transformer(kind, sizes)
    base, start, run = tmp_path / "base", tmp_path / "start", tmp_path / "run"
    model.save_pretrained(base)
    import_model(Import(base, start), Silent())
    config = tuned_config(start, adapter, layout)
    run.mkdir()
    pool.run(Layout.from_config(config.parallel).world_size, tune, start, run, config)
    return base, run, model


@pytest.mark.parametrize("made", list(MODELS), indirect=True)
def test_peft_computes_with_exported_adapters_what_the_merged_export_does(
    made: tuple[Path, Path, nn.Module], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, run, model = made
    tokens = torch.arange(2 * LENGTH).view(2, -1) % 90 + 1
    before = model(tokens).logits.detach()
    export_adapter(run, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    logits = adapted(tokens).logits.detach()
    assert (logits - before).abs().max() > 1e-3
    export_model(Export(run, tmp_path / "merged", dtype="fp32"), Silent())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(tokens).logits.detach(), logits, rtol=1e-5, atol=1e-5)
    theirs = dict(adapted.merge_and_unload().named_parameters())
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("made", [name for name in MODELS if name != "magnitudes of some"], indirect=True)
def test_adapters_come_back_as_they_were(made: tuple[Path, Path, nn.Module], tmp_path: Path) -> None:
    base, run, _ = made
    export_adapter(run, tmp_path / "adapter")
    import_model(Import(base, tmp_path / "again", adapter=tmp_path / "adapter"), Silent())
    before, after = (
        {n: t for n, t in stored(each).items() if n.startswith(MODEL)} for each in (run, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    assert any("lora" in name for name in after)
    for name, tensor in before.items():
        # Of magnitudes, peft has the sum with the norms of the rows.
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-6 * name.endswith("magnitude"), msg=name)


PEFT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", SIZES, {"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}),
    "scales": (
        "qwen3",
        SIZES | {"head_dim": 8},
        {"target_modules": "all-linear", "alpha_pattern": {"k_proj": 3, "layers.1.self_attn.q_proj": 11}},
    ),
    "fused": ("phi3", SIZES | {"pad_token_id": 0}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "gpt2": ("gpt2", GPT | {"tie_word_embeddings": False}, {"target_modules": ["c_attn", "c_proj", "wte"]}),
    "magnitudes": (
        "qwen3",
        SIZES | {"head_dim": 8},
        {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True},
    ),
    "magnitudes of fused": (
        "phi3",
        SIZES | {"pad_token_id": 0},
        {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    ),
    "magnitudes of gpt2": (
        "gpt2",
        GPT | {"tie_word_embeddings": False},
        {"target_modules": ["c_attn", "c_fc"], "use_dora": True},
    ),
    "one layer": ("llama", SIZES, {"target_modules": ["up_proj"], "layers_to_transform": [1], "use_rslora": True}),
}


def adapt(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    """Give a model of transformers adapters of `peft` with random values, and save them."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                start = parameter if "magnitude" in name else 0
                parameter.copy_(start + torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("name", list(PEFT))
def test_imported_adapters_compute_what_peft_does(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    kind, sizes, settings = PEFT[name]
    model = transformer(kind, sizes)
    model.save_pretrained(tmp_path / "base")
    tokens = torch.arange(2 * LENGTH).view(2, -1) % 90 + 1
    before = model(tokens).logits.detach()
    logits = adapt(model, tmp_path / "adapter", **settings)(tokens).logits.detach()
    assert (logits - before).abs().max() > 1e-3
    import_model(Import(tmp_path / "base", tmp_path / "run", adapter=tmp_path / "adapter"), Silent())
    export_model(Export(tmp_path / "run", tmp_path / "merged", dtype="fp32"), Silent())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(tokens).logits.detach(), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "embeddings have none in Threefold"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which"),
        ({"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}, "v_proj has the rank 2, and others"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "bias is 'all'; Threefold has bias 'none' alone"),
    ],
)
def test_what_no_run_could_have_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    model = transformer("llama", SIZES)
    model.save_pretrained(tmp_path / "base")
    adapt(model, tmp_path / "adapter", **settings)
    with pytest.raises(UserError) as error:
        import_model(Import(tmp_path / "base", tmp_path / "run", adapter=tmp_path / "adapter"), Silent())
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


def test_experts_are_merged_and_have_no_adapter_in_peft(pool, tmp_path: Path) -> None:
    model = transformer("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2})
    base, start, run = (tmp_path / name for name in ("base", "start", "run"))
    model.save_pretrained(base)
    import_model(Import(base, start), Silent())
    run.mkdir()
    pool.run(2, tune, start, run, tuned_config(start, {}, {"dp": 2, "ep": 2}))
    with pytest.raises(UserError, match=r"has an adapter of blocks.0.mlp.experts.*which is no linear layer of mixtral"):
        export_adapter(run, tmp_path / "adapter")
    export_model(Export(run, tmp_path / "merged", dtype="fp32"), Silent())
    import_model(Import(tmp_path / "merged", tmp_path / "again"), Silent())
    tokens = torch.arange(2 * LENGTH).view(2, -1) % 90 + 1
    torch.testing.assert_close(logits_of(tmp_path / "again", tokens), logits_of(run, tokens), rtol=1e-5, atol=1e-5)


def logits_of(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = Trained.find(run).load()
    hidden = model.hidden(tokens)
    assert hidden is not None
    return model.logits(hidden)
