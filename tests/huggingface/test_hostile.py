"""Folders of Hugging Face that someone damaged or made up: each is refused in a sentence, and nothing is left."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from typer.testing import CliRunner

from tests.huggingface.hand_made import llama_tensors, refused, stored, write_llama
from tests.support.command import Silent
from threefold.checkpoint.folder import newest
from threefold.cli.main import app
from threefold.errors import UserError
from threefold.huggingface.files import TensorFiles
from threefold.huggingface.import_hf import Import, import_model

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def _write_tokenizer(folder: Path, tokens: int, first: int = 0) -> None:
    vocabulary = {f"w{number}": first + number for number in range(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf")
    _write_tokenizer(source, 4096)
    told = refused(source, tmp_path / "run")
    assert "tokenizer.json has 4,096 tokens with ids up to 4,095 and the embedding has 301 rows" in told
    _write_tokenizer(source, 10, first=292)  # few, and one of them is beyond
    assert "10 tokens with ids up to 301 and the embedding has 301 rows" in refused(source, tmp_path / "run")
    _write_tokenizer(source, 301)
    import_model(Import(source, tmp_path / "whole"), Silent())
    _write_tokenizer(source, 66)  # a vocabulary with room left is usual
    import_model(Import(source, tmp_path / "small"), Silent())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"][7, :3] = float("nan")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("-inf")
    tensors["model.layers.2.mlp.down_proj.weight"][:, 5] = float("inf")
    source = write_llama(tmp_path / "hf", tensors=tensors)
    told = refused(source, tmp_path / "run")
    assert "model.embed_tokens.weight holds 3 values that are NaN or infinite and 2 more tensors 25" in told
    assert "--allow-not-finite" in told
    import_model(Import(source, tmp_path / "run", allow_not_finite=True), Silent())
    assert sum(int(tensor.isnan().sum()) for tensor in stored(tmp_path / "run").values()) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_one_value_that_is_not_finite_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in llama_tensors().items()}
    tensors["model.layers.2.self_attn.v_proj.weight"][11, 23] = float("nan")
    told = refused(write_llama(tmp_path / "hf", tensors=tensors), tmp_path / "run")
    assert "model.layers.2.self_attn.v_proj.weight holds 1 values that are NaN or infinite; fetch" in told


@pytest.mark.parametrize("place", [(0, 0), (2, 2_000_000)])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_block_of_a_large_weight_is_looked_at(tmp_path: Path, place: tuple[int, int], transposed: bool) -> None:
    weight = torch.randn(3, 2_000_001).half()  # several blocks of a million elements
    weight[place] = float("-inf")
    save_file({"model.w": weight.t().contiguous() if transposed else weight}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path, "model.")
    read = files.read("model.w", (0, 3), (0, 2_000_001), None, transposed)
    assert torch.equal(read, weight)
    assert files.not_finite() == {"model.w": 1}
    assert files.not_finite() == {}  # they are counted once


def test_the_end_of_a_text_is_what_the_config_says(tmp_path: Path) -> None:
    """Whatever the tokenizer calls an end; which counts only for a config that names none."""
    for given, expected in ((5, 5), ([6, 5], 6), (None, 9)):
        source = write_llama(tmp_path / f"hf{expected}", {"eos_token_id": given})
        _write_tokenizer(source, 9)
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|endoftext|>"])
        assert tokenizer.token_to_id("<|endoftext|>") == 9
        tokenizer.save(str(source / "tokenizer.json"))
        import_model(Import(source, tmp_path / f"run{expected}"), Silent())
        checkpoint = newest(tmp_path / f"run{expected}")
        assert checkpoint is not None
        assert checkpoint.facts.eod == expected


def test_a_loss_that_is_not_finite_ends_eval(tmp_path: Path) -> None:
    """The text is named; nothing is printed as if it were a result."""
    tensors = llama_tensors()
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    source = write_llama(tmp_path / "hf", tensors=tensors)
    _write_tokenizer(source, 301)
    run, data = tmp_path / "run", tmp_path / "texts.jsonl"
    data.write_text('{"text": "w1"}\n{"text": "w1 w2 w3"}\n')
    imported = CliRunner().invoke(app, ["checkpoint", "import", str(source), "--out", str(run), "--allow-not-finite"])
    assert imported.exit_code == 0
    result = CliRunner().invoke(app, ["eval", str(run), "--data", str(data)])
    assert isinstance(result.exception, UserError)
    assert "The loss of text 2 is not finite: the weights hold values that are not finite" in str(result.exception)
    assert "nan" not in result.stdout


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (["model.safetensors"], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"model.norm.weight": 3}, "the file 3, which is not a name of a safetensors file in that folder"),
        ({"model.norm.weight": ["model.safetensors"]}, "which is not a name"),
        ({"model.norm.weight": "../secret.safetensors"}, "the file '../secret.safetensors', which is not a name"),
        ({"model.norm.weight": "/etc/passwd"}, "which is not a name"),
        ({"model.norm.weight": "..\\x.safetensors"}, "which is not a name"),
        ({"model.norm.weight": "a\0.safetensors"}, "which is not a name"),
        ({"model.norm.weight": ".."}, "which is not a name"),
        ({"model.norm.weight": "x" * 5000 + ".safetensors"}, "which is not a name"),
        ({"model.norm.weight": "gone.safetensors"}, "names gone.safetensors, which is not there"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, weight_map: Any, expected: str) -> None:
    source = write_llama(tmp_path / "hf")
    save_file(llama_tensors(), tmp_path / "secret.safetensors")
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert expected in refused(source, tmp_path / "run")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, INDEX, "merges.txt"],
)
def test_what_is_no_file_is_refused_without_a_hang(tmp_path: Path, name: str) -> None:
    source = write_llama(tmp_path / "hf")
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    assert "no regular file (a pipe, socket or device)" in refused(source, tmp_path / "run")
    (source / name).unlink()
    (source / name).symlink_to("/dev/zero")
    assert "it is a link that leads out of its folder" in refused(source, tmp_path / "run")
    (source / name).unlink()
    (source / name).mkdir()
    assert "it is a folder" in refused(source, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("config.json", '{"a":' * 100_000, "nested too deeply"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", '{"hidden_size": ' + "9" * 5000 + "}", "Cannot read"),
        ("generation_config.json", "[1]", "holds no JSON object"),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}', "must be a token's id or a list of them"),
        ("generation_config.json", '{"eos_token_id": -2}', "must be a token's id or a list of them"),
        ("tokenizer_config.json", "null", "holds no JSON object"),
        ("tokenizer.json", "[]", "holds no JSON object"),
        ("special_tokens_map.json", "{", "it is not JSON"),
    ],
)
def test_texts_that_are_not_what_they_should_be(tmp_path: Path, name: str, text: str, expected: str) -> None:
    source = write_llama(tmp_path / "hf")
    (source / name).write_text(text)
    assert expected in refused(source, tmp_path / "run")


def _header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return damage


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return header[min(name for name in header if name != "__metadata__")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: struct.pack("<Q", 1 << 62) + content[8:],
        lambda content: struct.pack("<Q", 1 << 33) + content[8:],
        lambda content: struct.pack("<Q", 0) + content[8:],
        lambda content: content[:100],
        lambda content: b"",
        _header(lambda header: _first(header).update(data_offsets=[0, 4])),
        _header(lambda header: _first(header).update(data_offsets=[-4, 4])),
        _header(lambda header: _first(header).update(data_offsets=[8, 2])),
        _header(lambda header: _first(header).update(data_offsets=[0, 1 << 60])),
        _header(lambda header: _first(header).update(data_offsets="all")),
        _header(lambda header: _first(header).update(shape=[1 << 62, 1 << 62])),
        _header(lambda header: _first(header).update(shape=[float("nan")])),
        _header(lambda header: _first(header).update(shape=[-1])),
        _header(lambda header: _first(header).update(dtype="F1")),
        _header(lambda header: _first(header).update(dtype=[])),
        _header(lambda header: header.update({name: _first(header) for name in list(header)})),
    ],
)
def test_damaged_safetensors(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    source = write_llama(tmp_path / "hf")
    (source / WEIGHTS).write_bytes(damage((source / WEIGHTS).read_bytes()))
    assert WEIGHTS in refused(source, tmp_path / "run")
