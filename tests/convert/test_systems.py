"""Fleet's flags, Colossal-AI's CONFIG, the configs that people start from, and whose file a file is."""

from pathlib import Path
from typing import Any

import pytest

from tests.convert.foreign_configs import FLEET_FLAGS, HYBRID_GPT, LOGGED_RUN
from threefold.config import load_config
from threefold.convert.conversion import Converted, convert
from threefold.errors import UserError


def _convert(folder: Path, name: str, content: str, world: int | None = None) -> Converted:
    (folder / name).write_text(content)
    return convert(folder / name, world_size=world)


def _outcome(folder: Path, name: str, content: str) -> str:
    """The notes of a conversion, or the sentence that it ends with."""
    try:
        return "\n".join(str(note.value) for note in _convert(folder, name, content).notes)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return str(error)


def _settings(found: Converted, folder: Path) -> dict[str, object]:
    (folder / "converted.yaml").write_text(found.to_yaml())
    sections = load_config(folder / "converted.yaml").sections()
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _parameters(model: dict[str, Any]) -> int:
    """Of a GPT with a tied head: embeddings, blocks of four matrices with biases and two norms, and the last norm."""
    width = model["hidden_size"]
    block = 12 * width**2 + 13 * width
    rows = model["vocab_size"] + model["max_position_embeddings"]
    return int(rows * width + model["num_layers"] * block + 2 * width)


def test_colossal_config_in_one_dict(tmp_path: Path) -> None:
    found = _convert(tmp_path, "train_gpt.py", HYBRID_GPT, world=8)
    assert (found.kind, found.invalid, found.unsupported) == ("colossal", "", [])
    expected = {
        "parallel.dp": 2,
        "parallel.tp": 2,
        "parallel.pp": 2,
        "train.global_batch_size": 192 * 3 * 2,
        "train.micro_batch_size": 1,
        "train.recompute": "full",
        "precision.dtype": "fp16",
        "precision.loss_scale": 32.0,
        "optimizer.lr": 0.00015,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip_grad_norm": 1.0,
        "data.sequence_length": 1024,
    }
    assert _settings(found, tmp_path).items() >= expected.items()
    keys = {note.key for note in found.notes}
    assert {"TENSOR_SHAPE", "BATCH_SIZE", "model.type", "optimizer.type"} <= keys


@pytest.mark.parametrize(
    ("name", "count"),
    [("GPT2_exlarge_pipeline_hybrid", 1_557_686_400), ("GPT3_pipeline_hybrid", 174_604_836_864)],
)
def test_colossal_models_have_their_sizes(tmp_path: Path, name: str, count: int) -> None:
    found = _convert(tmp_path, "gpt.py", HYBRID_GPT.replace("GPT2_exlarge_pipeline_hybrid", name), world=8)
    assert _parameters(found.sections["model"]) == count


def test_fleet_flags_that_share_and_that_are_not_known(tmp_path: Path) -> None:
    text = FLEET_FLAGS.replace("--sharding_degree 1 --sharding_stage 1", "--sharding_degree 2 --sharding_stage 2")
    found = _convert(
        tmp_path, "run.sh", text.replace("--dp_degree 2", "--dp_degree 1 --frob 3").replace("gpt2-", "my-")
    )
    assert (
        _settings(found, tmp_path).items() >= {"parallel.dp": 2, "parallel.zero": 2, "parallel.zero_shards": 2}.items()
    )
    assert {note.key for note in found.unsupported} == {"frob", "model_name_or_path"}


def test_fleet_script_that_sets_keys_of_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gpt.yaml").write_text(LOGGED_RUN)
    script = (
        "python -m paddle.distributed.launch --devices 0,1 ./tools/train.py -c ./configs/gpt.yaml \\\n"
        "  -o Engine.max_steps=7 -o Distributed.mp_degree=1 -o Distributed.pp_degree=1 -o Model.frob=1\n"
    )
    found = _convert(tmp_path, "run.sh", script)
    assert found.kind == "fleet"
    settings = _settings(found, tmp_path)
    assert settings.items() >= {"train.max_steps": 7, "parallel.tp": 1, "parallel.dp": 2, "model.num_layers": 4}.items()
    assert {note.key for note in found.unsupported} == {"Model.frob"}
    with pytest.raises(UserError, match=r"starts a training with \./configs/other\.yaml, which does not exist"):
        _convert(tmp_path, "run.sh", script.replace("gpt.yaml", "other.yaml"))


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("config.txt", HYBRID_GPT, "colossal"),
        ("train", "parallel = dict(pipeline=1)\n", "colossal"),
        ("config.py", "#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 2\n", "megatron"),
        ("settings", "Model:\n  num_layers: 2\nDistributed:\n  mp_degree: 2\n", "fleet"),
        ("flags.yaml", "--num-layers 2 --hidden-size 64\n", "megatron"),
        ("gpt.txt", "MODEL_ARGS:\n  --num-layers: 2\n", "megatron"),
        ("pretrain_gpt.sh", FLEET_FLAGS, "fleet"),
    ],
)
def test_whose_file_it_is_follows_from_its_content(tmp_path: Path, name: str, content: str, kind: str) -> None:
    found = _convert(tmp_path, name, content)
    assert found.kind == kind
    assert found.evidence.startswith("its ")


@pytest.mark.parametrize(
    "content",
    [
        "BATCH_SIZE = 8\nX = 'a' * 10**12\nY = [0] * 10**12\nZ = 10 ** 10 ** 10\nW = 9 ** 999999999 % 7\n",
        "BATCH_SIZE = 8\nA = [1] * 9\n"
        + "".join(f"A{i} = [{', '.join([f'A{i - 1}' if i else 'A'] * 50)}]\n" for i in range(40)),
        "BATCH_SIZE = 8\nA = dict(x=1)\n"
        + "".join(f"A = dict({', '.join(f'k{j}=A' for j in range(50))})\n" for i in range(40)),
        "BATCH_SIZE = 8\nX = " + "(" * 150 + "1" + ")" * 150 + "\n",
        "BATCH_SIZE = 8\nX = " + "[" * 5000 + "\n",
        "BATCH_SIZE = 8\nX = " + "-" * 20000 + "1\n",
        "BATCH_SIZE = 8\nX = " + "+".join(["1"] * 20000) + "\n",
        "BATCH_SIZE = 8\nX = " + "9" * 5000 + "\n",
        "BATCH_SIZE = 10 ** 400\n",
    ],
)
def test_hostile_python_does_no_harm(tmp_path: Path, content: str) -> None:
    """Neither memory nor time goes into what a file only writes down."""
    told = _outcome(tmp_path, "hostile.py", content)
    assert len(told) < 1_000_000
