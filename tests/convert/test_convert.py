"""Files of other systems as configs of ours: every value arrives, and nothing of theirs is dropped in silence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.foreign_configs import (
    COLOSSAL,
    EXPECTED,
    FLEET,
    FLEET_BASE,
    FLEET_FLAGS,
    LLAMA,
    LOGGED_RUN,
    MEGATRON,
)
from threefold.config import Config, load_config, resolve
from threefold.convert.conversion import Converted, convert
from threefold.convert.key_mapping import KeyMapping, count, number, switch, whole
from threefold.errors import UserError


def _settings(found: Converted, folder: Path) -> dict[str, Any]:
    """What the printed YAML says, as read back from a file, resolved."""
    file = folder / "converted.yaml"
    file.write_text(found.to_yaml())
    config: Config = resolve(load_config(file), 50257)
    return {f"{section}.{key}": value for section, values in config.sections().items() for key, value in values.items()}


def _convert(folder: Path, name: str, content: str, **options: Any) -> Converted:
    (folder / name).write_text(content)
    return convert(folder / name, **options)


def _reasons(found: Converted) -> dict[str, str]:
    return {note.key: note.reason for note in found.notes}


WORLDS = {"gpt2.py": 8}
TEXTS = dict(zip(EXPECTED, (FLEET, COLOSSAL, MEGATRON, LLAMA, FLEET_FLAGS, LOGGED_RUN), strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_becomes_these_settings_and_the_rest_is_noted(tmp_path: Path, name: str) -> None:
    (tmp_path / "base.yaml").write_text(FLEET_BASE)
    found, expected = _convert(tmp_path, name, TEXTS[name], world_size=WORLDS.get(name)), EXPECTED[name]
    assert (found.kind, found.invalid) == (expected["kind"], "")
    assert _settings(found, tmp_path).items() >= expected["settings"].items()
    assert _reasons(found) == expected["noted"]
    assert [note.key for note in found.unsupported] == expected["unsupported"]


def test_fleet_of_the_first_versions(tmp_path: Path) -> None:
    found = _convert(
        tmp_path,
        "old.yaml",
        "Data: {batch_size: {local_batch_size: 8}, dataset: {input_dir: d, max_seq_len: 64}}\n"
        "Optimizer: {adam_beta1: 0.8, adam_epsilon: 1.0e-6, lr: {max_lr: 1e-5, min_lr: 5e-5}, grad_clip: 2.0}\n",
        world_size=4,
    )
    assert found.sections["data"] == {"path": "d", "eod": 50256, "sequence_length": 64}
    assert found.sections["train"]["global_batch_size"] == 32
    assert found.sections["parallel"] == {"dp": 4}
    assert found.sections["optimizer"]["betas"] == [0.8, 0.999]
    assert found.sections["optimizer"]["clip_grad_norm"] == 2.0
    assert (found.sections["optimizer"]["lr"], found.sections["optimizer"]["min_lr"]) == (1e-5, 5e-5)
    assert found.invalid == ""  # Fleet's own example, whose rate rises after the warm-up


def test_nothing_of_a_python_file_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    code = f"open({str(marker)!r}, 'w')\nX = __import__('pathlib').Path({str(marker)!r}).touch()\nBATCH_SIZE = 4\n"
    found = _convert(tmp_path, "evil.py", code)
    assert not marker.exists()
    assert {"line 1", "X"} <= set(_reasons(found))


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--swiglu", "swiglu"),
        ("--normalization RMSNorm", "normalization"),
        ("--disable-bias-linear", "disable-bias-linear"),
        ("--normalization RMSNorm --swiglu --disable-bias-linear", "position-embedding-type"),
        ("--normalization RMSNorm --swiglu --position-embedding-type rope", "disable-bias-linear"),
        ("--group-query-attention --num-query-groups 2", "num-query-groups"),
    ],
)
def test_mixed_families_are_told(tmp_path: Path, flags: str, key: str) -> None:
    found = _convert(tmp_path, "flags.txt", f"--num-layers 2 {flags}\n")
    assert "not convertible exactly" in _reasons(found)[key]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.yaml", "- 1\n", "is not a Fleet config: it must be a mapping of sections such as Model: and Engine:."),
        ("a.yaml", "Model: {num_layers: many}\n", "Model.num_layers is 'many' but must be a whole number."),
        ("a.yaml", "Model: {num_layers: -1}\n", "model.num_layers is -1 but must be at least 1."),
        (
            "a.yaml",
            "_base_: gone.yaml\n",
            "_base_ is 'gone.yaml' but that file does not exist; put it where the key says.",
        ),
        ("a.yaml", "_base_: a.yaml\n", "_base_ is 'a.yaml' but that file is circular."),
        ("a.py", "parallel = dict(\n", "not Python, so it is not a Colossal-AI config."),
        ("a.py", "import torch\n", "has no assignment such as BATCH_SIZE = 8, so it is not a Colossal-AI config."),
        ("a.py", "BATCH_SIZE = 8\nNUM_MICRO_BATCHES = 3\n", "NUM_MICRO_BATCHES is 3 but must divide BATCH_SIZE 8."),
        ("a.py", "parallel = dict(pipeline=0)\n", "parallel.pipeline is 0 but must be at least 1."),
        (
            "a.sh",
            "echo hello\n",
            "has no flags such as --num-layers 24, so it is not Megatron-LM's; name its system with --from.",
        ),
        ("a.sh", "X='\n", "a quote that does not close is not read"),
        ("a.sh", "--lr fast\n", "lr is 'fast' but must be a number."),
        ("a.sh", "--fp16 --bf16\n", "--fp16 and --bf16 are both given but one excludes the other; leave one out."),
        ("a.sh", "--world-size 3 --tensor-model-parallel-size 2\n", "the world size is 3 but must be a multiple of 2"),
    ],
)
def test_malformed(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        _convert(tmp_path, name, content)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_variable_that_is_not_set_is_told(tmp_path: Path) -> None:
    found = _convert(tmp_path, "a.sh", "python pretrain_gpt.py --num-layers $LAYERS --data-path $DATA\n")
    assert _reasons(found)["num-layers"].startswith("a variable that the file does not set")
    assert found.sections["data"]["path"] == "$DATA"
    assert "data-path" in _reasons(found)


@pytest.mark.parametrize(("given", "kept"), [("false", False), ("True", True), (True, True), ("FALSE", False)])
def test_a_switch_may_be_a_word(given: object, kept: bool) -> None:
    assert switch(given) is kept


@pytest.mark.parametrize(("kind", "given"), [(whole, 2.5), (whole, "x"), (count, 0), (number, "nan"), (switch, "yes")])
def test_a_value_of_another_kind_is_one_sentence(kind: Callable[[Any], Any], given: object) -> None:
    with pytest.raises(UserError, match=rf"^f\.yaml: key is {given!r} but must be "):
        KeyMapping(Path("f.yaml"), {"key": given}).take("key", kind)


def test_colossal_sequence_parallelism_is_a_ring_of_context_ranks(tmp_path: Path) -> None:
    code = "parallel = dict(pipeline=2, tensor=dict(size=4, mode='sequence'))\nBATCH_SIZE = 4\nSEQ_LEN = 64\n"
    found = _convert(tmp_path, "ring.py", code, world_size=16).sections["parallel"]
    assert found == {"dp": 2, "pp": 2, "cp": 4, "cp_method": "ring"}
