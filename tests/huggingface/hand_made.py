"""A hand-made Hugging Face model, and the tensors of exported folders and of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.command import Silent
from threefold.checkpoint.folder import newest
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.errors import UserError
from threefold.huggingface.import_hf import Import, import_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
GPT = {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def llama_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return random weights of `LLAMA`, by their names in a file."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (301, 24), "model.norm.weight": (24,)}
    for layer in range(3):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (24,),
                "self_attn.q_proj": (24, 24),
                "self_attn.k_proj": (12, 24),
                "self_attn.v_proj": (12, 24),
                "self_attn.o_proj": (24, 24),
                "post_attention_layernorm": (24,),
                "mlp.gate_proj": (40, 24),
                "mlp.up_proj": (40, 24),
                "mlp.down_proj": (24, 40),
            }.items()
        }
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1 if len(shape) == 1 else 0)
        for name, shape in shapes.items()
    }


def write_llama(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write a Hugging Face model folder as its own tools would; return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | (config or {})))
    save_file(llama_tensors() if tensors is None else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def refused(source: Path, out: Path, **options: Any) -> str:
    """Return the sentence that an import ends with; nothing is left where it was to go."""
    with pytest.raises(UserError) as caught:
        import_model(Import(source, out, **options), Silent())
    assert not list(out.parent.glob(f"{out.name}*"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    return str(caught.value)


def stored(run: Path) -> dict[str, Tensor]:
    """Return the weights of a run's newest checkpoint as stored."""
    checkpoint = newest(run)
    assert checkpoint is not None
    facts = stored_tensors(checkpoint.path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in facts.items()}
    load_tensors(tensors, checkpoint.path, alone=True)
    return tensors


def file_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
