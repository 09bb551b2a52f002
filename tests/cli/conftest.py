"""A small corpus, and the command line called as the console script calls it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from threefold.cli import main


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    output: str
    error: str


Command = Callable[..., Ended]


@pytest.fixture
def threefold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `threefold ARGUMENTS...` in this process."""

    def call(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["threefold", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        return Ended(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of a few hundred short documents with a vocabulary of at most 300."""
    from threefold.data.prepare.preparation import PrepareRequest, prepare

    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.jsonl"
    lines = [{"text": f"Document {n} says that {n * n} is the square of {n}."} for n in range(400)]
    text.write_text("\n".join(json.dumps(line) for line in lines))
    prepare(PrepareRequest((text,), folder / "tokens", vocab_size=300, workers=1), _Quiet())
    return folder / "tokens"


class _Quiet:
    """No progress bar."""

    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, read_bytes: int) -> None:
        pass


@pytest.fixture
def config_file(tmp_path: Path, tokens: Path) -> Path:
    """A config that trains a tiny model on `tokens` for four steps."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
        "train: {max_steps: 4, global_batch_size: 4, eval_every: 2, eval_batches: 1, device: cpu}\n"
        "checkpoint: {every: 2}\n"
    )
    return path
