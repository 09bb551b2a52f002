"""What the commands say of a checkpoint of `threefold.save`, which has no config: one sentence that names `load`."""

from pathlib import Path

import pytest

import threefold as t3
from tests.api.layer_list import layers
from tests.support.command import Command


def saved(folder: Path) -> None:
    t3.save(folder, 3, model=t3.parallelize(layers(), mesh=t3.init_mesh()))


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loop")
    pool.run(1, saved, made)
    return made


@pytest.mark.parametrize("command", ["generate", "eval", "export"])
def test_a_command_that_needs_a_config_says_so(folder: Path, tmp_path: Path, threefold: Command, command: str) -> None:
    (tmp_path / "texts.txt").write_text("words")
    arguments = {
        "generate": ("generate", folder, "--prompt", "words"),
        "eval": ("eval", folder, "--data", tmp_path / "texts.txt"),
        "export": ("checkpoint", "export", folder, "--out", tmp_path / "out"),
    }[command]
    ended = threefold(*arguments)
    assert ended.status == 2
    assert ended.error.count("\n") == 1
    assert "(saved by threefold.save, without a config.yaml: threefold.load opens it)" in ended.error
    assert "has no complete checkpoint" in ended.error


def test_a_run_cannot_resume_from_it(folder: Path, threefold: Command, tokens: Path) -> None:
    config = folder.parent / "run.yaml"
    config.write_text(f"data: {{path: {tokens}, sequence_length: 8}}\n")
    ended = threefold("train", config, "--run-dir", folder, "--resume")
    assert ended.status == 2
    assert ended.error.count("\n") == 1
    assert "(saved by threefold.save, without a config.yaml: threefold.load opens it)" in ended.error
