"""`threefold checkpoint convert`: the same tensors in another format, dtype or number of files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from tests.support.command import Command, Silent
from tests.train.support import Run, losses_of, train_rank
from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import newest
from threefold.checkpoint.manifest import Facts, read_writer, write_manifest
from threefold.checkpoint.tensors import load_tensors, save_tensors_alone, stored_tensors
from threefold.convert.checkpoints import Conversion, convert_checkpoint
from threefold.errors import UserError
from threefold.huggingface.source import check_export
from threefold.launch.training_run import prepare_training
from threefold.report.checkpoints import verify_checkpoint
from threefold.verify.worker_pool import WorkerPool


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(folder).items()}
    load_tensors(found, folder, alone=True)
    return found


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert got.keys() == expected.keys()
    assert got
    return all(torch.equal(got[name], expected[name]) and got[name].dtype == expected[name].dtype for name in expected)


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def states(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "optimizer."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def convert(source: Path, out: Path, **settings: Any) -> Path:
    """The folder of the converted checkpoint, or of the files."""
    convert_checkpoint(Conversion(source, out, **settings), Silent())
    made = newest(out)
    return made.path if made else out


def test_one_file_of_four_and_back(run: Path, tmp_path: Path) -> None:
    """The tensors, the facts and the writer stay; the files are merged, or cut at a size."""
    before = newest(run)
    assert before is not None
    original = tensors_of(before.path)
    merged = convert(run, tmp_path / "merged")
    assert [path.name for path in sorted(merged.glob("*.bin"))] == ["tensors-00000.bin"]
    cut = convert(tmp_path / "merged", tmp_path / "cut", shard_bytes=20_000)
    files = sorted(cut.glob("*.bin"))
    largest = max(tensor.nbytes for tensor in original.values())
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) <= max(20_000, largest)
    for folder in (merged, cut):
        assert same(tensors_of(folder), original)
        verify_checkpoint(folder, Silent())
        after = newest(folder.parent.parent)
        assert after is not None
        assert after.facts == before.facts
        assert read_writer(folder) == read_writer(before.path)


def test_a_converted_run_resumes_bit_equal(pool: WorkerPool, small_run: Run, run: Path, tmp_path: Path) -> None:
    longer = small_run.but(dp=2, steps=6)
    convert(run, tmp_path / "converted", shard_bytes=20_000)
    (tmp_path / "converted" / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    for folder in (run, tmp_path / "converted"):
        pool.run(2, train_rank, longer, folder, True)
    assert losses_of(tmp_path / "converted") == losses_of(run)


def test_weights_alone_in_another_dtype(threefold: Command, small_run: Run, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = threefold("checkpoint", "convert", run, "--out", out, "--dtype", "bf16", "--weights-only")
    assert (ended.status, ended.error) == (0, "")
    made = newest(out)
    assert made is not None
    original = weights(tensors_of(run / "checkpoints" / "step_00000004"))
    found = tensors_of(made.path)
    assert same(weights(found), {name: tensor.bfloat16() for name, tensor in original.items()})
    assert not states(found)
    refused = threefold("train", out / "config.yaml", "--run-dir", out, "--resume", "--set", "train.max_steps=9")
    assert refused.status == 2
    assert (
        f"has a model and no optimizer state to resume; start a run in another folder with train.init_from {out}"
        in (refused.error)
    )
    generated = threefold("generate", out, "--prompt", "a", "--max-new-tokens", "2")
    assert generated.status == 0, generated.error


def test_no_output_is_among_the_checkpoints_of_a_run(small_run: Run, run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run / "checkpoints")
    for out in (run / "checkpoints" / "step_00000099", tmp_path / "link" / "other"):
        with pytest.raises(UserError, match=r"is among the checkpoints of the run .* choose a folder apart"):
            convert(run, out)
        with pytest.raises(UserError, match=r"is among the checkpoints of the run .* choose a folder apart"):
            check_export(run, out, False)
        with pytest.raises(UserError, match=r"--run-dir .* is among the checkpoints of the run"):
            prepare_training(small_run.config, out)
        assert not out.exists()


@pytest.mark.parametrize("place", ["run/weights", "run", "link/weights", "."])
def test_no_output_is_contains_or_lies_in_what_is_read(run: Path, tmp_path: Path, place: str) -> None:
    """Also one that does not exist yet, and through links."""
    (tmp_path / "link").symlink_to(run)
    out = tmp_path / place
    for write in (lambda: convert(run, out), lambda: check_export(run, out, True)):
        with pytest.raises(
            UserError, match=r"^--out .* (is inside|contains|is an input|is a folder that other things)"
        ):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run"]


def test_other_values_do_not_keep_the_fingerprint(run: Path, tmp_path: Path) -> None:
    """A fingerprint is of the weights' values, which another dtype rounds."""
    before = newest(run)
    assert before is not None
    facts = replace(before.facts, fingerprint="0123456789ab")
    write_again(run, tmp_path / "exact", tensors_of(before.path), facts)
    for dtype, expected in ((None, "0123456789ab"), ("bf16", None)):
        convert(tmp_path / "exact", tmp_path / f"{dtype}", dtype=dtype)
        made = newest(tmp_path / f"{dtype}")
        assert made is not None
        assert made.facts == replace(before.facts, fingerprint=expected)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000])
def test_safetensors(run: Path, tmp_path: Path, shard_bytes: int) -> None:
    out = convert(run, tmp_path / "out", format="safetensors", shard_bytes=shard_bytes)
    original = tensors_of(run / "checkpoints" / "step_00000004")
    for stem, expected in (("model", weights(original)), ("optimizer", states(original))):
        found: dict[str, Tensor] = {}
        files = sorted(out.glob(f"{stem}*.safetensors"))
        for path in files:
            found |= load_file(path)
        assert same(found, expected)
        index = out / f"{stem}.safetensors.index.json"
        assert index.exists() == (len(files) > 1) == (shard_bytes == 20_000)
        if index.exists():
            assert json.loads(index.read_text())["weight_map"].keys() == expected.keys()
    assert (out / "config.yaml").exists()


@pytest.mark.parametrize("dtype", [None, "fp64"])
def test_torch(run: Path, tmp_path: Path, dtype: str | None) -> None:
    out = convert(run, tmp_path / "out", format="torch", dtype=dtype)
    original = tensors_of(run / "checkpoints" / "step_00000004")
    model = torch.load(out / "model.pt", weights_only=True)
    wide = {name: tensor.double() if dtype else tensor for name, tensor in weights(original).items()}
    assert same(model, wide)
    optimizer = torch.load(out / "optimizer.pt", weights_only=True)
    found = {f"{name}.{state}": tensor for name, each in optimizer.items() for state, tensor in each.items()}
    assert same(found, states(original))
    stored = sum(tensor.untyped_storage().nbytes() for tensor in model.values())
    assert stored == sum(tensor.nbytes for tensor in wide.values())  # none brings the others along
    assert not list(out.glob("*scratch*"))


def test_torch_distributed_checkpoint(run: Path, tmp_path: Path) -> None:
    out = convert(run, tmp_path / "out", format="dcp", weights_only=True)
    original = tensors_of(run / "checkpoints" / "step_00000004")
    found = {name: torch.zeros_like(tensor) for name, tensor in original.items() if name.startswith("model.")}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    assert same(weights(found), weights(original))


def test_values_that_a_dtype_does_not_have(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = convert(run, tmp_path / "wide")
    name = "model.embed.tokens.weight"
    source = tmp_path / "large"
    large_embedding(wide.parent.parent, source, name)
    with pytest.raises(UserError, match=rf"{name} of .* has 1 values beyond those of float16, .* use --dtype bf16"):
        convert(source, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".*threefold*")) == []
    assert convert(source, tmp_path / "out", dtype="bf16")


def large_embedding(run: Path, to: Path, name: str) -> None:
    """A copy of a run with one weight that fp16 does not have."""
    before = newest(run)
    assert before is not None
    tensors = tensors_of(before.path)
    tensors[name][0, 0] = 1e6
    write_again(run, to, tensors, before.facts)


def write_again(run: Path, to: Path, tensors: dict[str, Tensor], facts: Facts) -> None:
    """Write a run's newest checkpoint with other tensors or facts."""
    before = newest(run)
    assert before is not None
    folder = to / before.path.relative_to(run)
    folder.mkdir(parents=True)
    save_tensors_alone(tensors, folder)
    (folder / "config.yaml").write_bytes((before.path / "config.yaml").read_bytes())
    write_manifest(folder, facts)


def test_damage_found_while_reading(run: Path, tmp_path: Path) -> None:
    """Of a run the one before is converted; a checkpoint that was named is an error. The first try leaves nothing."""
    folder = run / "checkpoints" / "step_00000004"
    content = bytearray((folder / "tensors-00000.bin").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "tensors-00000.bin").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"its tensors-00000\.bin does not have the checksum"):
        convert(folder, tmp_path / "named")
    assert not (tmp_path / "named").exists()
    made = convert_checkpoint(Conversion(run, tmp_path / "out"), Silent())
    assert made.step == 2
    assert "step_00000004 (its tensors-00000.bin does not" in made.warnings[0]


def test_nothing_else_is_overwritten(threefold: Command, run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("text")
    for out, reason in ((mine, "exists already"), (run, "is an input")):
        ended = threefold("checkpoint", "convert", run, "--out", out)
        assert ended.status == 2
        assert reason in ended.error
        assert ended.error.count("\n") == 1
    first = threefold("checkpoint", "convert", run, "--out", tmp_path / "out")
    again = threefold("checkpoint", "convert", run, "--out", tmp_path / "out", "--overwrite")
    assert (first.status, again.status) == (0, 0)
    foreign = threefold("checkpoint", "convert", run, "--out", mine, "--overwrite")
    assert foreign.status == 2
    assert "was not written by this program" in foreign.error
    assert (mine / "thesis.txt").read_text() == "text"
