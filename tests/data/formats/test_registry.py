"""A token format of another package, one file and one entry point: runs and `threefold data` read it like ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.plugin_package import write_package
from threefold.convert.tokens import convert
from threefold.data.formats.registry import TOKEN_FORMATS, holds_tokens, open_corpus, token_formats
from threefold.output import SILENT

TOY = """
from pathlib import Path

import numpy as np

from threefold.data.corpus import StoredTokens
from threefold.data.formats.registry import TokenFormat, with_ending
from threefold.errors import UserError


def read(prefix: Path) -> StoredTokens:
    path = with_ending(prefix, ".toy")
    lines = [np.array(line.split(), np.int32) for line in path.read_text().splitlines()]
    if not lines:
        raise UserError(f"{path} holds no tokens.")
    starts = np.cumsum([0, *map(len, lines)])
    return StoredTokens(prefix, "Toy", (path,), np.concatenate(lines), starts)


def write(stored: StoredTokens, prefix: Path, progress) -> None:
    documents = [stored.tokens[a:b] for a, b in zip(stored.documents, stored.documents[1:])]
    progress.phase("Writing toys", stored.tokens.nbytes)
    with_ending(prefix, ".toy").write_text("".join(" ".join(map(str, one)) + "\\n" for one in documents))


FORMAT = TokenFormat((".toy",), read, write)
"""
RUN = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 12}
data: {path: tokens.toy, sequence_length: 8, split: "1"}
train: {max_steps: 2, global_batch_size: 2, eval_every: 0}
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "site", "threefold.token_formats", {"toy": "toy_format:FORMAT"}, TOY, "toy_format")


def test_a_toy_format_is_one_file(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)
    (tmp_path / "tokens.toy").write_text("3 1 2\n4 5\n")
    for place in ("tokens.toy", "tokens"):
        corpus = open_corpus(tmp_path / place, vocab_size=12)
        assert (corpus.tokens.tolist(), corpus.documents.tolist()) == ([3, 1, 2, 4, 5], [0, 3, 5])
    assert holds_tokens(tmp_path / "tokens")
    convert(tmp_path / "tokens.toy", "toy", tmp_path / "copy", None, None, False, SILENT)
    assert (tmp_path / "copy.toy").read_text() == "3 1 2\n4 5\n"


@pytest.mark.slow
def test_a_format_of_another_package(package: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{package}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}

    def threefold(*arguments: str, fails: bool = False) -> str:
        command = [sys.executable, "-m", "threefold", *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert bool(done.returncode) == fails, done.stderr
        return " ".join((done.stdout + done.stderr).split())

    documents = [[(3 * i + j) % 11 + 1 for j in range(5 + i % 4)] for i in range(12)]
    (tmp_path / "tokens.toy").write_text("".join(" ".join(map(str, one)) + "\n" for one in documents))
    (tmp_path / "run.yaml").write_text(RUN)

    shown = threefold("data", "show", "tokens.toy", "--sequence-length", "8", "--split", "1")
    assert "format Toy" in shown
    assert "documents 12" in shown
    assert "Toy has no checksums; highest token 11" in threefold("data", "verify", "tokens")
    threefold("data", "convert", "tokens.toy", "--to", "megatron", "--out", "copy")
    threefold("data", "convert", "copy", "--to", "toy", "--out", "back.toy")
    assert (tmp_path / "back.toy").read_bytes() == (tmp_path / "tokens.toy").read_bytes()
    assert "training loss" in threefold("train", "run.yaml", "--run-dir", "run")
    unknown = threefold("data", "convert", "tokens.toy", "--to", "tog", "--out", "other", fails=True)
    assert "--to is 'tog' but must be one of megatron, toy, threefold; the nearest is toy." in unknown


def test_every_built_in_format_loads() -> None:
    endings = [ending for name in TOKEN_FORMATS.built_in for ending in token_formats()[name].endings]
    assert endings == [".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz"]
    assert len(set(endings)) == len(endings), "a file's format is known by its ending"
