"""Optimizers of other systems become ours where they mean the same."""

from pathlib import Path
from typing import Any

import pytest

from threefold.config import load_config
from threefold.convert.conversion import Converted, convert

_MEGATRON = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-4"


def _optimizer(found: Converted, folder: Path) -> dict[str, Any]:
    """The converted section; the config has to load."""
    assert (found.invalid, found.unsupported) == ("", [])
    (folder / "converted.yaml").write_text(found.to_yaml())
    section: dict[str, Any] = load_config(folder / "converted.yaml").sections()["optimizer"]
    return section


def _converted(folder: Path, name: str, text: str) -> Converted:
    (folder / name).write_text(text)
    return convert(folder / name)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"name": "adamw", "betas": [0.9, 0.999], "weight_decay": 0.01}),
        ("--optimizer adam --adam-beta2 0.95", {"name": "adamw", "betas": [0.9, 0.95]}),
        ("--optimizer sgd --sgd-momentum 0.8", {"name": "sgd", "momentum": 0.8}),
        ("--optimizer sgd", {"name": "sgd", "momentum": 0.9}),
        ("--optimizer sgd --sgd-momentum 0", {"name": "sgd", "momentum": 0.0}),
    ],
)
def test_megatron(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    found = _converted(tmp_path, "train.sh", f"{_MEGATRON} --micro-batch-size 1 {flags}\n")
    given = _optimizer(found, tmp_path)
    assert {key: given[key] for key in expected} == expected


def test_a_momentum_that_megatron_does_not_read_is_noted(tmp_path: Path) -> None:
    found = _converted(tmp_path, "train.sh", f"{_MEGATRON} --sgd-momentum 0.8\n")
    (note,) = (note for note in found.notes if note.key == "sgd-momentum")
    assert (note.reason, note.unsupported) == ("only --optimizer sgd reads it", False)
    assert "momentum" not in found.sections["optimizer"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("type=HybridAdam, lr=1e-3, weight_decay=0.1", {"name": "adamw", "betas": [0.9, 0.999]}),
        ("type=HybridAdam, lr=1e-3, adamw_mode=False", {"name": "adam", "betas": [0.9, 0.999]}),
        ("type='torch.optim.Adam', lr=1e-3, betas=(0.9, 0.98)", {"name": "adam", "betas": [0.9, 0.98]}),
        ("type='SGD', lr=1e-3, momentum=0.9, nesterov=True", {"name": "sgd", "momentum": 0.9, "nesterov": True}),
        ("type='SGD', lr=1e-3", {"name": "sgd"}),
    ],
)
def test_colossal(tmp_path: Path, call: str, expected: dict[str, Any]) -> None:
    text = f"BATCH_SIZE = 8\nSEQ_LEN = 8\nNUM_LAYERS = 2\nHIDDEN_SIZE = 8\nNUM_ATTENTION_HEADS = 2\noptimizer = dict({call})\n"
    given = _optimizer(_converted(tmp_path, "train_gpt.py", text), tmp_path)
    assert {key: given[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("{name: FusedAdamW}", {"name": "adamw", "weight_decay": 0.01}),
        ("{name: Adam, beta2: 0.98}", {"name": "adam", "betas": [0.9, 0.98], "weight_decay": 0.0}),
        ("{name: Momentum}", {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0}),
        (
            "{name: Momentum, momentum: 0.8, use_nesterov: True, weight_decay: 0.1}",
            {"name": "sgd", "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        ),
    ],
)
def test_paddlefleetx(tmp_path: Path, settings: str, expected: dict[str, Any]) -> None:
    text = f"Global: {{seed: 1, global_batch_size: 8, micro_batch_size: 1}}\nModel: {{hidden_size: 768}}\nOptimizer: {settings}\n"
    found = _converted(tmp_path, "train.yaml", text)
    given = _optimizer(found, tmp_path)
    assert {key: given[key] for key in expected} == expected
    noted = [note.reason for note in found.notes if note.key == "Optimizer.name"]
    decays_all = expected["name"] != "adamw" and expected["weight_decay"] > 0
    assert noted == (
        ["optimizer.name is sgd; optimizer.weight_decay is for weight matrices, not biases and norms"]
        if decays_all
        else []
    )
