"""Activation functions and dropout of other systems become ours where they mean the same."""

from pathlib import Path
from typing import Any

import pytest

from threefold.config import load_config
from threefold.convert.conversion import Converted, convert

_FLAGS = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-4 "
    "--micro-batch-size 1 --ffn-hidden-size 16"
)
_LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
_SIZES = "num_layers=2, hidden_size=8, num_attention_heads=2"
_DROPOUTS = ("hidden_dropout", "attention_dropout", "embedding_dropout")


def _converted(folder: Path, name: str, text: str) -> Converted:
    (folder / name).write_text(text)
    found = convert(folder / name)
    assert found.invalid == ""
    return found


def _model(found: Converted, folder: Path) -> dict[str, Any]:
    """The converted section; the config has to load."""
    (folder / "converted.yaml").write_text(found.to_yaml())
    section: dict[str, Any] = load_config(folder / "converted.yaml").sections()["model"]
    return section


def _unsupported(found: Converted) -> dict[str, str]:
    return {note.key: note.reason for note in found.unsupported}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "gelu_tanh"),  # fused with the bias, Megatron-LM's GELU is the approximation
        ("--no-bias-gelu-fusion", "gelu"),
        ("--openai-gelu", "gelu_tanh"),
        ("--openai-gelu --no-bias-gelu-fusion", "gelu_tanh"),
        ("--squared-relu", "relu2"),
        ("--squared-relu --no-bias-gelu-fusion", "relu2"),
    ],
)
def test_megatron(tmp_path: Path, flags: str, expected: str) -> None:
    found = _converted(tmp_path, "train.sh", f"{_FLAGS} {flags}\n")
    assert _unsupported(found) == {}
    assert _model(found, tmp_path)["activation"] == expected


@pytest.mark.parametrize(
    ("flags", "key", "reason"),
    [
        ("--quick-geglu", "quick-geglu", "the only gated function is SwiGLU, that of llama"),
        ("--swiglu", "swiglu", "gpt has no gates; with --normalization RMSNorm it is llama"),
        (f"{_LLAMA} --squared-relu", "squared-relu", "llama has SwiGLU"),
        (f"{_LLAMA} --openai-gelu", "openai-gelu", "llama has SwiGLU"),
    ],
)
def test_a_function_of_megatron_that_is_not_there_is_unsupported(
    tmp_path: Path, flags: str, key: str, reason: str
) -> None:
    assert reason in _unsupported(_converted(tmp_path, "train.sh", f"{_FLAGS} {flags}\n"))[key]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (f"{_SIZES}, act_func='relu'", {"activation": "relu"}),
        (f"{_SIZES}, activation=nn.functional.gelu, mlp_ratio=3.0", {"activation": "gelu", "ffn_hidden_size": 24}),
        (
            f"{_SIZES}, drop_rate=0.1, attn_drop_rate=0.2, embed_drop_rate=0.3",
            dict(zip(_DROPOUTS, (0.1, 0.2, 0.3), strict=True)),
        ),
        (
            f"{_SIZES}, dropout=0.1, attention_dropout=0.2, embedding_dropout=0.0, layernorm_epsilon=1e-6",
            {**dict(zip(_DROPOUTS, (0.1, 0.2, 0.0), strict=True)), "norm_eps": 1e-6},
        ),
        ("type=GPT2_small_pipeline_hybrid", {"activation": "gelu", **dict.fromkeys(_DROPOUTS, 0.0)}),
        (
            "type=gpt2_small, dropout=0.2",
            {"activation": "gelu", **dict.fromkeys(_DROPOUTS, 0.1), "hidden_dropout": 0.2},
        ),
        ("type=gpt2_small, act_func='swish'", {"activation": "silu"}),
    ],
)
def test_colossal(tmp_path: Path, call: str, expected: dict[str, Any]) -> None:
    found = _converted(tmp_path, "train_gpt.py", f"BATCH_SIZE = 8\nSEQ_LEN = 8\nmodel = dict({call})\n")
    assert _unsupported(found) == {}
    given = _model(found, tmp_path)
    assert {key: given[key] for key in expected} == expected


def test_a_function_that_colossal_does_not_know_is_unsupported(tmp_path: Path) -> None:
    found = _converted(tmp_path, "gpt.py", f"BATCH_SIZE = 8\nSEQ_LEN = 8\nmodel = dict({_SIZES}, act_func='mish')\n")
    (reason,) = _unsupported(found).values()
    assert reason == "no function that is known, such as gelu or relu or swish or silu; set model.activation"
    assert "activation" not in found.sections["model"]


@pytest.mark.parametrize(("name", "expected"), [("gelu", "gelu_tanh"), ("relu", "relu"), ("swish", "silu")])
def test_paddlefleetx(tmp_path: Path, name: str, expected: str) -> None:
    """Its GPTs have no dropout of embeddings apart from `hidden_dropout_prob`, whose value ours has by default."""
    text = "Global: {seed: 1, global_batch_size: 8, micro_batch_size: 1}\nModel: {hidden_size: 768, hidden_act: " + name
    found = _converted(tmp_path, "train.yaml", text + "}\n")
    assert _unsupported(found) == {}
    given = _model(found, tmp_path)
    assert given["activation"] == expected
    flags = f"--global_batch_size 8 --micro_batch_size 1 --hidden_activation {name}"
    found = _converted(tmp_path, "run.sh", f"python -m paddle.distributed.launch run_pretrain.py {flags}\n")
    assert _model(found, tmp_path)["activation"] == expected
