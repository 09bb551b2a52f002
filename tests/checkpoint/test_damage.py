"""A damaged checkpoint is never used: the newest good one before it is, with a warning that says why."""

import builtins
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command, Silent
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, train_rank
from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import folders, path_of, select_checkpoint
from threefold.checkpoint.manifest import read_manifest
from threefold.checkpoint.resume import find_resumption, find_warm_start, has_all_steps
from threefold.checkpoint.tensors import stored_tensors
from threefold.checksums import seal_text
from threefold.errors import UserError
from threefold.huggingface.export_hf import Export, export_model
from threefold.inference.model import Trained
from threefold.verify.worker_pool import WorkerPool

EVERY = (("checkpoint.every", 2), ("checkpoint.keep", 0))


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tp 2 with checkpoints after steps 2 and 4, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pool.run(2, train_rank, small_run.but(tp=2, set=EVERY), folder)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


def flip(name: str, place: float = 0.5) -> Callable[[Path], None]:
    """Flip a bit at a place from 0, the beginning, to 1, the end."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        (folder / name).write_bytes(content)

    return change


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


DAMAGE = {
    "a lost manifest": ("checkpoint.json", lose("checkpoint.json")),
    "a lost index": ("tensors.json", lose("tensors.json")),
    "lost tensors": ("tensors-00001.bin", lose("tensors-00001.bin")),
    "tensors cut short": ("tensors-00000.bin", cut("tensors-00000.bin")),
    "a bit of the manifest": ("checkpoint.json", flip("checkpoint.json")),
    "a bit of the index": ("tensors.json", flip("tensors.json")),
    "a bit of the config": ("config.yaml", flip("config.yaml")),
    "a bit of the tokenizer": ("tokenizer.json", flip("tokenizer.json")),
    "a folder for the manifest": ("checkpoint.json", instead("checkpoint.json", Path.mkdir)),
    "a pipe for the manifest": ("checkpoint.json", instead("checkpoint.json", os.mkfifo)),
    "a pipe for the config": ("config.yaml", instead("config.yaml", os.mkfifo)),
    "a pipe for tensors": ("tensors-00000.bin", instead("tensors-00000.bin", os.mkfifo)),
}
"""What is seen before anything is loaded: the file that is named, and how it is damaged."""


@sweep(("name", "damage"), DAMAGE.values(), ids=DAMAGE, quick=(0, 3, 6, 9))
def test_the_one_before_is_chosen(
    small_run: Run, run: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(path_of(run, 4))
    config = small_run.but(steps=6, tp=2, set=EVERY).config
    new = config.model_copy(update={"train": config.train.model_copy(update={"init_from": str(run)})})
    trained, resumption, beginning = Trained.find(run), find_resumption(run, config), find_warm_start(new)
    exported = export_model(Export(run, tmp_path / "hf"), Silent())
    assert beginning is not None
    assert (trained.checkpoint.step, resumption.checkpoint.step, beginning.checkpoint.step, exported.step) == (2,) * 4
    for warnings in (trained.warnings, resumption.warnings, beginning.warnings, exported.warnings):
        (warning,) = warnings
        assert "step_00000004" in warning
        assert name in warning
    damage(path_of(run, 2))
    with pytest.raises(UserError, match="no complete checkpoint") as caught:
        Trained.find(run)
    assert "step_00000004" in str(caught.value)
    assert "step_00000002" in str(caught.value)
    assert str(caught.value).endswith("; restore one of them from a copy, or train again in another folder.")


@sweep("name", ["tensors-00000.bin", "tensors-00001.bin"], slow=(0, 1))
def test_damage_found_while_loading(
    threefold: Command,
    pool: WorkerPool,
    small_run: Run,
    run: Path,
    whole: Path,
    tmp_path: Path,
    name: str,
) -> None:
    """By one rank alone, where the other reads what is good: both take the one before."""
    flip(name, 0.001)(path_of(run, 4))
    resumed = Path(shutil.copytree(run, tmp_path / "resumed"))
    printed, _ = pool.run(2, train_rank, small_run.but(steps=6, tp=2, set=EVERY), resumed, True)
    assert printed.count("step_00000004 (its") == 1
    assert "Resuming from" in printed
    assert f"its {name} does not have the checksum" in printed
    assert losses_of(resumed)[:4] == losses_of(whole)
    begun = small_run.but(steps=1, tp=2, set=(("train.init_from", str(run)),))
    printed, _ = pool.run(2, train_rank, begun, tmp_path / "begun")
    assert "step_00000002" in printed
    assert f"its {name} does not have the checksum" in printed
    (tmp_path / "a.txt").write_text("The statement returns a value.")
    for command in (["generate", run, "--prompt", "The"], ["eval", run, "--data", tmp_path / "a.txt"]):
        ended = threefold(*command)
        assert ended.status == 0
        assert ended.error.count("\n") == 1
        assert f"its {name} does not have the checksum" in ended.error
    assert "step 2," in ended.output
    ended = threefold("checkpoint", "export", run, "--out", tmp_path / "hf")
    assert ended.status == 0
    assert name in ended.error
    assert "2 steps" in ended.output


@pytest.mark.parametrize("name", ["tensors-00001.bin", "config.yaml"])
def test_a_damaged_last_checkpoint_is_made_again(
    pool: WorkerPool, small_run: Run, run: Path, whole: Path, name: str
) -> None:
    """A run does not say that all its steps are made where their result cannot be read."""
    config = small_run.but(tp=2, set=EVERY)
    assert has_all_steps(run, 4)
    with pytest.raises(UserError, match="is at step 4 already"):
        find_resumption(run, config.config)
    flip(name, 0.001)(path_of(run, 4))
    assert not has_all_steps(run, 4)
    found = find_resumption(run, config.config)
    assert (found.checkpoint.step, found.skipped) == (2, (path_of(run, 4),))
    assert name in found.warnings[0]
    pool.run(2, train_rank, config, run, "auto")
    assert has_all_steps(run, 4)
    assert losses_of(run) == losses_of(whole)


def test_a_damaged_one_is_not_among_those_that_are_kept(pool: WorkerPool, small_run: Run, run: Path) -> None:
    """Nor is the good one that the run fell back on deleted in its favour."""
    flip("tensors-00000.bin", 0.001)(path_of(run, 4))
    config = small_run.but(tp=2, steps=5, set=(("checkpoint.every", 5), ("checkpoint.keep", 2)))
    pool.run(2, train_rank, config, run, True)
    assert [path.name for path in folders(run)] == ["step_00000002", "step_00000004", "step_00000005"]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file of JSON as somebody would who knows about its checksum, and the manifest's."""
    document = json.loads(path.read_text())
    document.pop("checksum", None)
    change(document)
    path.write_text(seal_text(json.dumps(document)))
    manifest = path.with_name("checkpoint.json")
    if path != manifest:
        from threefold.checksums import checksum

        held = {"bytes": path.stat().st_size, "checksum": checksum(path)}
        rewrite(manifest, lambda document: document["files"].update({path.name: held}))


NESTED = "[" * 100_000 + "]" * 100_000
WRONG = [None, [], {}, "x", -1, 1e400, True, [[[[]]]], "../../x"]


def test_wrong_types_in_the_manifest_are_no_traceback(run: Path) -> None:
    shutil.rmtree(path_of(run, 2))
    path = path_of(run, 4) / "checkpoint.json"
    content = path.read_text()
    keys = json.loads(content).keys() - {"checksum"}
    assert {"format", "version", "step", "files", "corpora", "loss_scale", "eod"} <= keys
    harmless = {("eod", None), ("loss_scale", None), ("tokenizer_sha256", None), ("tokenizer_sha256", "x")}
    harmless |= {("tokenizer_sha256", "../../x"), ("corpora", "[]"), ("contents", "[]")}
    harmless |= {("anomalies", None), ("anomalies", "{}"), ("fingerprint", None), ("special_tokens", None)}
    harmless |= {("beginning", None), ("beginning", "[]"), ("evaluation_missed", True)}
    for key in sorted(keys):
        for value in WRONG:
            rewrite(path, partial(dict.update, **{key: value}))
            if (
                key,
                str(value) if value in ([], {}) else value if isinstance(value, str | bool | None) else ...,
            ) in harmless:
                assert Trained.find(run).warnings == ()
            else:
                sentence = refusal(run)
                assert "checkpoint.json" in sentence or "manifest" in sentence
            path.write_text(content)
    path.write_text(NESTED)
    assert "nested too deeply" in refusal(run)
    path.write_text(content)
    rewrite(path, partial(dict.update, version=3))
    assert "has version 3 of the format and this Threefold reads version 1; use the Threefold that" in refusal(run)


def refusal(run: Path) -> str:
    """The one sentence with which a run's only checkpoint is refused."""
    with pytest.raises(UserError) as caught:
        Trained.find(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TENSORS = "tensors-00000.bin"


def noting(opened: list[str], original: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> Any:
    """Open a file, and add its path to a list."""
    opened.append(str(path) if isinstance(path, int) else os.path.realpath(path))
    return original(path, *rest, **options)


@sweep("kind", ["relative", "absolute", "linked folder", "below", "..", ""], quick=(0, 1))
def test_no_file_outside_the_folder_is_opened(run: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Not even one that holds what the folder's own does, so that nothing else is wrong with the checkpoint."""
    folder = path_of(run, 4)
    place = folder / "below" if kind == "below" else run.parent / "outside"
    place.mkdir()
    outside = Path(shutil.copy(folder / TENSORS, place))
    (folder / "link").symlink_to(place)
    name = {
        "relative": os.path.relpath(outside, folder),
        "absolute": str(outside),
        "linked folder": f"link/{TENSORS}",
        "below": f"below/{TENSORS}",
    }.get(kind, kind)
    assert kind in ("..", "") or (folder / name).samefile(outside)
    opened: list[str] = []
    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", partial(noting, opened, module.open))

    def misname(document: dict[str, Any]) -> None:
        chunks = [chunk for tensor in document["tensors"].values() for chunk in tensor["chunks"]]
        for chunk in chunks:
            if chunk["file"] == TENSORS:
                chunk["file"] = name
        assert any(chunk["file"] == name for chunk in chunks)

    manifest = folder / "checkpoint.json"
    rewrite(manifest, lambda document: document["files"].update({name: document["files"][TENSORS]}))
    (warning,) = Trained.find(run).warnings
    assert "its checkpoint.json has no usable files" in warning
    rewrite(manifest, lambda document: document["files"].pop(name))
    assert Trained.find(run).warnings == ()
    rewrite(folder / "tensors.json", misname)
    trained = Trained.find(run)
    (warning,) = trained.warnings
    assert "tensors.json" in warning
    trained.load()
    assert os.path.realpath(path_of(run, 2) / TENSORS) in opened
    assert not [path for path in opened if path.startswith(os.path.realpath(place))]


def change_chunk(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        chunks = document["tensors"]["model.blocks.0.mlp.up.weight"]["chunks"]
        assert len(chunks) == 2
        chunks[0].update(values)

    return change


@sweep(
    "values",
    [{"offsets": [0, 0, 0]}, {"offsets": [1, 0]}, {"sizes": [47, 24]}, {"position": 1 << 40}, {"bytes": 3}]
    + [
        {key: value} for key in ("offsets", "sizes", "position", "bytes", "checksum") for value in (None, -1, {}, 1e400)
    ],
    ids=str,
    quick=(0, 1, 2, 3, 4, 8, 11, 14, 17, 20, 22),
)
def test_an_index_that_cannot_be_is_refused(run: Path, values: dict[str, Any]) -> None:
    rewrite(path_of(run, 4) / "tensors.json", change_chunk(**values))
    trained = Trained.find(run)
    assert trained.checkpoint.step == 2
    with pytest.raises(DamagedCheckpoint):
        stored_tensors(path_of(run, 4))


def test_parts_may_not_overlap(run: Path) -> None:
    """As many elements as the tensor has, some of them twice and some never."""

    def overlap(document: dict[str, Any]) -> None:
        first, second = document["tensors"]["model.blocks.0.mlp.up.weight"]["chunks"]
        second["offsets"] = first["offsets"]

    rewrite(path_of(run, 4) / "tensors.json", overlap)
    (warning,) = Trained.find(run).warnings
    assert "do not make up the whole" in warning


@sweep(
    ("before", "after"),
    [
        ("num_layers: 3", "num_layers: 2"),
        ("hidden_size: 24", "hidden_size: 28"),
        ("vocab_size: 301", "vocab_size: 302"),
        ("max_position_embeddings: 16", "max_position_embeddings: 17"),
        ("ffn_hidden_size: 96", "ffn_hidden_size: 48"),
        ("num_layers: 3", "num_layers: 999999999"),
    ],
    quick=(0, 5),
)
def test_a_config_of_another_model_is_refused(
    threefold: Command,
    small_run: Run,
    run: Path,
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    for step in (2, 4):
        path = path_of(run, step) / "config.yaml"
        path.write_text(path.read_text().replace(before, after, 1))
        held = path.stat().st_size
        rewrite(
            path_of(run, step) / "checkpoint.json", lambda it, held=held: it["files"]["config.yaml"].update(bytes=held)
        )  # type: ignore[misc]
    (tmp_path / "a.txt").write_text("The statement returns a value.")
    config = tmp_path / "config.yaml"
    config.write_text(small_run.but(steps=6, tp=2, set=EVERY).config.to_yaml())
    for command in (
        ["generate", run, "--prompt", "The"],
        ["eval", run, "--data", tmp_path / "a.txt"],
        ["checkpoint", "export", run, "--out", tmp_path / "hf"],
        ["train", config, "--run-dir", run, "--resume"],
        ["train", config, "--run-dir", tmp_path / "new", "--set", f"train.init_from={run}"],
    ):
        ended = threefold(*command)
        assert (ended.status, ended.output) == (2, "")
        assert ended.error.count("\n") == 1
        key, value = before.split(":")[0], after.split()[1]
        assert re.search(rf"model\.{key} (is )?{value}\b", ended.error.replace(",", ""))


def test_ranks_exchange_a_checkpoint_without_the_list_of_its_files(run: Path) -> None:
    """All ranks send as much as the first, and there is a file per rank."""
    checkpoint = select_checkpoint(run, str(run), "").checkpoint
    assert checkpoint.files == {}
    assert read_manifest(checkpoint.path).files
