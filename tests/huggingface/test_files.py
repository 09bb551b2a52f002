"""Folders of Hugging Face made by hand: what is refused and how, what is carried along, and training from one."""

import json
import os
import shutil
from errno import ENOSPC
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.huggingface.hand_made import LLAMA, file_tensors, llama_tensors, refused, stored, write_llama
from tests.support.command import Silent
from tests.train.support import Run, losses_of, same, train_rank
from threefold.checkpoint.folder import newest
from threefold.cli.main import app
from threefold.errors import UserError
from threefold.huggingface.export_hf import Export, export_model
from threefold.huggingface.files import choose_type, split
from threefold.huggingface.import_hf import Import, import_model
from threefold.huggingface.mapping import SourceRows, WeightMap
from threefold.launch.training_run import prepare_training
from threefold.models.gpt import GPTConfig
from threefold.models.llama import LlamaConfig
from threefold.verify.worker_pool import WorkerPool

INDEX = "model.safetensors.index.json"


def test_an_unknown_key_may_be_ignored(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf", {"shiny": 3})
    assert "give --ignore shiny" in refused(source, tmp_path / "run")
    import_model(Import(source, tmp_path / "run", ("shiny",)), Silent())


def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf")
    whole = (source / "model.safetensors").read_bytes()
    for length in (4, 200, len(whole) - 3):
        (source / "model.safetensors").write_bytes(whole[:length])
        assert "model.safetensors cannot be read" in refused(source, tmp_path / "run")
    (source / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refused(source, tmp_path / "run")
    (source / "pytorch_model.bin").touch()
    assert "reads safetensors alone" in refused(source, tmp_path / "run")
    (source / "config.json").write_text('{"model_type":')
    assert "config.json: it is not JSON" in refused(source, tmp_path / "run")
    assert "does not exist" in refused(tmp_path / "nowhere", tmp_path / "run")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    source = write_llama(tmp_path / "hf")
    (source / "model.safetensors").unlink()
    names = [f"model-{number + 1:05d}-of-00002.safetensors" for number in range(2)]
    shares = [dict(list(tensors.items())[number::2]) for number in range(2)]
    for name, share in zip(names, shares, strict=True):
        save_file(share, source / name)
    weight_map = {key: name for name, share in zip(names, shares, strict=True) for key in share}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    import_model(Import(source, tmp_path / "whole"), Silent())
    save_file({key: tensor for key, tensor in shares[1].items() if "norm" not in key}, source / names[1])
    assert "the files it names do not hold it" in refused(source, tmp_path / "run")
    (source / names[1]).unlink()
    assert f"names {names[1]}, which is not there" in refused(source, tmp_path / "run")


def test_weights_of_other_kinds(tmp_path: Path) -> None:
    """Names without their prefix, buffers of old files, a tied head that is there too; integers are refused."""
    plain = llama_tensors()
    import_model(Import(write_llama(tmp_path / "plain"), tmp_path / "run"), Silent())
    short = {name.removeprefix("model."): tensor for name, tensor in plain.items()}
    short["layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(3)
    short["lm_head.weight"] = plain["model.embed_tokens.weight"].clone()
    import_model(Import(write_llama(tmp_path / "short", tensors=short), tmp_path / "run2"), Silent())
    torch.testing.assert_close(stored(tmp_path / "run"), stored(tmp_path / "run2"), rtol=0, atol=0)
    short["lm_head.weight"][300, 23] += 1
    told = refused(write_llama(tmp_path / "head", tensors=short), tmp_path / "run3")
    assert "tie_word_embeddings true, and lm_head.weight is not model.embed_tokens.weight" in told
    plain["model.norm.weight"] = torch.ones(24, dtype=torch.int8)
    assert "model.norm.weight as I8" in refused(write_llama(tmp_path / "int", tensors=plain), tmp_path / "run3")


def test_texts_that_go_along_are_looked_at(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a tokenizer.json that can be read (Model missing" in refused(source, tmp_path / "run")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").write_bytes(b'{"bos_token": "\xe9"}')
    assert "tokenizer_config.json is not UTF-8 text (byte 15)" in refused(source, tmp_path / "run")
    (source / "tokenizer_config.json").unlink()
    import_model(Import(source, tmp_path / "run"), Silent())
    ended = CliRunner().invoke(app, ["generate", str(tmp_path / "run"), "--prompt", "a"])
    assert ended.output == ""
    assert "was imported without a tokenizer, so output cannot be decoded; put" in str(ended.exception)


class Interrupted(Silent):
    """Ctrl-C, or another end, once a tensor is under way."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def advance(self, amount: int) -> None:
        raise self._error


def test_ctrl_c_and_a_full_disk_end_an_import(tmp_path: Path) -> None:
    request = Import(write_llama(tmp_path / "hf"), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        import_model(request, Interrupted(KeyboardInterrupt()))
    with pytest.raises(UserError, match=r"run could not be written \(No space left on device\); make room or"):
        import_model(request, Interrupted(OSError(ENOSPC, os.strerror(ENOSPC))))
    with pytest.raises(UserError, match=r"run could not be written \(rank 0: unexpected pos 64\); make room or"):
        import_model(request, Interrupted(RuntimeError("unexpected pos 64")))
    assert not list(tmp_path.glob("run*"))


def test_what_no_family_has_is_not_exported(tmp_path: Path) -> None:
    rotary = GPTConfig(position_embedding="rope")
    with pytest.raises(UserError, match=r"a place for this model: each lacks one of model.position_embedding rope\."):
        choose_type(rotary, None)
    with pytest.raises(UserError, match=r"each lacks one of .*model\.qkv_bias true"):
        choose_type(LlamaConfig(qkv_bias=True, qk_norm=True), "qwen2")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        export_model(Export(tmp_path / "run", tmp_path / "hf"), Silent())


def test_training_goes_on_from_an_import_in_any_layout(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf")
    shutil.copy(small_run.data / "tokenizer.json", source)
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    import_model(Import(source, tmp_path / "imported"), Silent())
    checkpoint = newest(tmp_path / "imported")
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.facts.eod) == (0, 0)
    settings = {
        "architecture": "llama",
        "hidden_size": 24,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 40,
        "max_position_embeddings": 64,
        "tie_embeddings": True,
    }
    start = tuple((f"model.{key}", value) for key, value in settings.items())
    run = small_run.but(dropout=0.0, steps=3, set=(*start, ("train.init_from", str(tmp_path / "imported"))))
    pool.run(1, train_rank, run, tmp_path / "one")
    printed = pool.run(4, train_rank, run.but(tp=2, pp=2), tmp_path / "four")[0]
    assert f"Starting from {checkpoint.path}." in printed
    assert same(losses_of(tmp_path / "four"), losses_of(tmp_path / "one"), "fp32")
    pool.run(1, train_rank, run.but(set=start), tmp_path / "drawn")
    assert abs(losses_of(tmp_path / "one")[0] - losses_of(tmp_path / "drawn")[0]) > 0.1

    made = export_model(Export(tmp_path / "four", tmp_path / "back", dtype="bf16"), Silent())
    assert (made.family, made.step, made.dtype) == ("llama", 3, "bfloat16")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", ".threefold-output.json",
    }  # fmt: skip
    exported = file_tensors(tmp_path / "back")
    assert exported.keys() == llama_tensors().keys()
    moved = exported["model.norm.weight"].float() - llama_tensors()["model.norm.weight"]
    assert 0 < moved.abs().max() < 0.1  # trained from those weights
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: told[key] for key in LLAMA} == LLAMA


def test_what_cannot_be_started_from(small_run: Run, tmp_path: Path) -> None:
    import_model(Import(write_llama(tmp_path / "hf"), tmp_path / "imported"), Silent())
    init = ("train.init_from", str(tmp_path / "imported"))
    wrong = small_run.but(set=(init,)).config
    with pytest.raises(UserError, match=r"model.architecture is 'gpt' but .* has 'llama', whose weights do not fit"):
        prepare_training(wrong, tmp_path / "new")
    with pytest.raises(UserError, match=r"train.init_from is .*, which has no complete checkpoint"):
        prepare_training(small_run.but(set=(("train.init_from", str(tmp_path)),)).config, tmp_path / "new")
    with pytest.raises(UserError, match="has a model and no optimizer state to resume; start a run in another"):
        prepare_training(wrong, tmp_path / "imported", resume=True)


def test_the_commands(tmp_path: Path) -> None:
    source, runner = write_llama(tmp_path / "hf"), CliRunner()
    arguments = ["checkpoint", "import", str(source), "--out", str(tmp_path / "run")]
    printed = runner.invoke(app, arguments, catch_exceptions=False).output
    for expected in (
        "family",
        "llama",
        "parameters",
        "21,216",
        "3 of width 24",
        "float32, 84.9 kB",
        "none in the folder",
    ):
        assert expected in printed
    with pytest.raises(UserError, match="exists already; choose another folder, or replace it with --overwrite"):
        runner.invoke(app, arguments, catch_exceptions=False)
    assert runner.invoke(app, [*arguments, "--overwrite"], catch_exceptions=False).exit_code == 0
    back = ["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--shard-size", "30KB"]
    printed = runner.invoke(app, back, catch_exceptions=False).output
    count = len(list((tmp_path / "back").glob("*.safetensors")))
    assert f"model-00001-of-{count:05d}.safetensors and {count - 1} more" in " ".join(printed.split())
    assert count > 2
    torch.testing.assert_close(file_tensors(tmp_path / "back"), file_tensors(source), rtol=0, atol=0)
    with pytest.raises(UserError, match="--shard-size '5 apples' is not a size such as 500MB or 5GB; use 5GB"):
        runner.invoke(app, [*back, "--shard-size", "5 apples"], catch_exceptions=False)


def test_a_parameter_is_split_as_the_files_have_it() -> None:
    """Transposed, of one expert of a stack, and interleaved in groups of rows."""
    weight = torch.arange(24.0).view(4, 6)
    assert torch.equal(split(WeightMap("w", (4, 6), (SourceRows("a"),), transposed=True), weight)["a"], weight.t())
    stack = weight.view(2, 2, 6)
    assert torch.equal(split(WeightMap("w", (2, 6), (SourceRows("a"),), expert=1), stack)["a"], stack[1])
    found = split(WeightMap("w", (4, 6), (SourceRows("even"), SourceRows("odd"))), weight)
    assert torch.equal(found["even"], weight[::2])
    assert torch.equal(found["odd"], weight[1::2])
