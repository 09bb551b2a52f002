"""Checkpoints of version 1 open as before, and what is made to look like one runs nothing."""

import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.archives import VERSION_1
from tests.support.command import Command
from tests.support.hf_models import Silent, file_tensors
from tests.support.sweep import sweep
from tests.train.support import losses_of, train
from threefold.checkpoint.selection import select_checkpoint
from threefold.checkpoint.tensors import load_tensors_alone, stored_tensors
from threefold.config import Config, load_config, resolve
from threefold.data.dataset import open_dataset
from threefold.errors import UserError
from threefold.huggingface.export_hf import Export, export_model
from threefold.launch.worker_pool import WorkerError, WorkerPool

STEP = Path("run/checkpoints/step_00000002")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder with `run` and `tokens` of the archive."""
    with tarfile.open(VERSION_1) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def config_of(old: Path, *overrides: str) -> Config:
    given = load_config(old / STEP / "config.yaml", [f"data.path={old / 'tokens'}", "train.max_steps=4", *overrides])
    return resolve(given, open_dataset(given).vocab_size)


@sweep(("tp", "pp"), [(2, 1), (1, 2)], quick=(1,))
def test_a_run_goes_on(pool: WorkerPool, old: Path, tp: int, pp: int) -> None:
    expected = losses_of(old / "run")
    assert len(expected) == 4
    pool.run(2, train, config_of(old, f"parallel.tp={tp}", f"parallel.pp={pp}"), old / "run", True)
    assert losses_of(old / "run") == pytest.approx(expected, rel=1e-5)


def test_it_starts_another_run(pool: WorkerPool, old: Path) -> None:
    config = config_of(old, f"train.init_from={old / 'run'}", "parallel.tp=1")
    pool.run(1, train, config, old / "new", False)
    assert losses_of(old / "new")[0] < losses_of(old / "run")[0]


def test_it_generates_evaluates_and_exports(threefold: Command, old: Path) -> None:
    (old / "a.jsonl").write_text('{"text": "the cat sat on a mat and saw some rain"}\n')
    assert threefold("generate", old / "run", "--prompt", "the cat", "--max-new-tokens", "3").error == ""
    ended = threefold("eval", old / "run", "--data", old / "a.jsonl")
    assert (ended.status, ended.error) == (0, "")
    made = export_model(Export(old / "run", old / "hf"), Silent())
    assert (made.step, made.warnings) == (2, ())
    assert file_tensors(old / "hf")["transformer.h.1.mlp.c_fc.weight"].shape == (8, 32)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def metadata(old: Path) -> Any:
    """What our own archive holds, which may be trusted."""
    return pickle.loads((old / STEP / ".metadata").read_bytes())


def put(old: Path, name: str, content: bytes) -> None:
    """Write a file of the checkpoint, and its size into the manifest."""
    (old / STEP / name).write_bytes(content)
    path = old / STEP / "checkpoint.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = len(content)
    path.write_text(json.dumps(manifest))


def bare(old: Path, target: Path) -> None:
    put(old, ".metadata", pickle.dumps(Evil(target)))


def bare_of_protocol_0(old: Path, target: Path) -> None:
    put(old, ".metadata", pickle.dumps(Evil(target), 0))


def nested(old: Path, target: Path) -> None:
    """In a place of a known type that nobody looks at."""
    value = metadata(old)
    value.storage_meta.modules = [Evil(target)]
    put(old, ".metadata", pickle.dumps(value))


def payload(old: Path, target: Path) -> None:
    """In the file of the tensors, in the place of one of them."""
    value = metadata(old)
    info = next(iter(value.storage_data.values()))
    path = old / STEP / info.relative_path
    torch.save(Evil(target), old / "evil")
    evil = (old / "evil").read_bytes()
    info.offset, info.length = path.stat().st_size, len(evil)
    put(old, info.relative_path, path.read_bytes() + evil)
    put(old, ".metadata", pickle.dumps(value))


ATTACKS = {"bare": bare, "protocol 0": bare_of_protocol_0, "nested": nested, "payload": payload}


@sweep("attack", ATTACKS.values(), ids=ATTACKS, quick=(0, 3))
def test_a_foreign_checkpoint_runs_nothing(
    threefold: Command,
    pool: WorkerPool,
    old: Path,
    attack: Callable[[Path, Path], None],
) -> None:
    target, run = old / "written", old / "run"
    attack(old, target)
    (old / "a.jsonl").write_text('{"text": "the cat sat"}\n')
    config = old / "config.yaml"
    config.write_text(config_of(old, "parallel.tp=1").to_yaml())
    commands: list[list[str | Path]] = [
        ["generate", run, "--prompt", "the"],
        ["eval", run, "--data", old / "a.jsonl"],
        ["checkpoint", "export", run, "--out", old / "hf"],
    ]
    in_the_ranks = attack is payload
    if not in_the_ranks:
        commands += [
            ["train", config, "--run-dir", run, "--resume"],
            ["train", config, "--run-dir", old / "new", "--set", f"train.init_from={run}"],
        ]
    for command in commands:
        ended = threefold(*command)
        assert ended.status == 2
        assert in_the_ranks or not ended.output
        assert ended.error.startswith("Error: ")
        assert ended.error.count("\n") == 1
        assert "no complete checkpoint" in ended.error
        assert "step_00000002" in ended.error
        assert ("distcp" if in_the_ranks else "posix.system") in ended.error
        assert not target.exists()
    if in_the_ranks:
        for resume, settings in ((True, ()), (False, (f"train.init_from={run}",))):
            with pytest.raises(WorkerError) as caught:
                pool.run(1, train, config_of(old, "parallel.tp=1", *settings), run if resume else old / "new", resume)
            assert isinstance(caught.value.error, UserError)
            assert "distcp" in str(caught.value.error)
    assert not target.exists()
    pickle.loads(pickle.dumps(Evil(target)))
    assert target.exists()  # the attack is one


def everything(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = select_checkpoint(run, lambda none: f"{run} has {none}").checkpoint
    tensors = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(checkpoint.path).items()
    }
    load_tensors_alone(tensors, checkpoint.path)
    return tensors


@sweep("name", [".metadata", "__0_0.distcp"], quick=(1,))
def test_no_flipped_bit_changes_a_tensor(old: Path, name: str) -> None:
    """Torch wrote checksums of the payloads, which it does not read itself."""
    random, expected = torch.Generator().manual_seed(1), everything(old / "run")
    content = (old / STEP / name).read_bytes()
    refused = 0
    for place in torch.randint(8 * len(content), (10,), generator=random).tolist():
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        (old / STEP / name).write_bytes(damaged)
        try:
            found = everything(old / "run")
        except UserError:
            refused += 1
            continue
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), place
    assert refused


def test_a_config_of_another_model_is_refused(threefold: Command, old: Path) -> None:
    path = old / STEP / "config.yaml"
    text = path.read_text()
    for before, after in (
        ("num_layers: 2", "num_layers: 1"),
        ("hidden_size: 8", "hidden_size: 6"),
        ("vocab_size: 301", "vocab_size: 310"),
        ("ffn_hidden_size: 32", "ffn_hidden_size: 64"),
        ("num_layers: 2", "num_layers: 1024"),
    ):
        assert before in text
        changed = text.replace(before, after, 1)
        if len(changed) != len(text):
            put(old, "config.yaml", changed.encode())
        else:
            path.write_text(changed)
        for command in (
            ["generate", old / "run", "--prompt", "a"],
            ["checkpoint", "export", old / "run", "--out", old],
        ):
            if command[0] == "checkpoint":
                command[-1] = old / "hf"
            ended = threefold(*command)
            assert (ended.status, ended.output) == (2, "")
            assert f"model.{before.split(':')[0]} {after.split()[1]}" in ended.error
