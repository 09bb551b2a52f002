"""Errors in a config are reported before torch is imported, by every command."""

import json
import os
from pathlib import Path

import pytest

from tests.support.command import ends_in_one_process

_TRAIN, _SHOW, _SIZE, _VERIFY = ("train",), ("config", "show"), ("config", "size"), ("verify",)
_ERRORS = [
    ((_TRAIN, _SHOW, _SIZE, _VERIFY), ["model.num_layer=4"], "not a setting; the nearest is model.num_layers."),
    ((_TRAIN, _SHOW, _SIZE, _VERIFY), ["model.num_layers=four"], "must be a whole number."),
    ((_TRAIN, _SHOW, _SIZE, _VERIFY), ["model.num_attention_heads=7"], "must divide model.hidden_size 256; use 8."),
    ((_TRAIN, _SHOW, _SIZE), ["parallel.tp=3"], "must divide model.num_attention_heads 8; use 2."),
    ((_TRAIN, _SHOW, _SIZE), ["parallel.dp=5"], "must be a multiple of parallel.dp 5; use 30."),
    ((_TRAIN, _SHOW, _SIZE), ["parallel.dp=2", "parallel.zero=1", "parallel.gradient_compression=bf16"], "use none or"),
    ((_TRAIN, _SHOW), ["train.device=cuda", "parallel.dp=4"], "this machine has 0 GPUs for 4 ranks"),
    ((_TRAIN, _SHOW), ["data.path=nowhere"], "data.path is nowhere, which does not exist"),
    ((_TRAIN, _SHOW), ["data.path=FILE"], "FILE"),
    ((_SIZE,), ["data.path=nowhere"], "model.vocab_size is not set"),
    ((_TRAIN,), ["train.init_from=missing", "data.sequence_length=16"], "has no complete checkpoint"),
    ((_TRAIN,), ["data.sequence_length=100000"], "sequence_length"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> dict[tuple[str, ...], tuple]:
    """How the command lines of `_ERRORS` end, all in one process, which therefore has imported what any of them has."""
    if any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd")):
        pytest.skip("torch is asked for the number of GPUs")
    folder = tmp_path_factory.mktemp("errors")
    (folder / "run.yaml").write_text(f"data: {{path: {tokens}}}\n")
    (folder / "FILE").write_text("no tokens")
    lines = [
        [*command, "run.yaml", *(word for override in overrides for word in ("--set", override))]
        for commands, overrides, _ in _ERRORS
        for command in commands
    ]
    lines.append(["verify", "run.yaml", "dp2·zz"])
    return dict(zip(map(tuple, lines), ends_in_one_process(lines, folder), strict=True))


@pytest.mark.parametrize(("commands", "overrides", "expected"), _ERRORS)
def test_an_error_in_a_config_is_one_sentence(told, commands, overrides: list[str], expected: str) -> None:
    words = [word for override in overrides for word in ("--set", override)]
    for command in commands:
        status, output, error, _ = told[(*command, "run.yaml", *words)]
        assert (status, output) == (2, "")
        assert error.startswith("Error: ")
        assert error.count("\n") == 1
        assert expected in error


def test_an_error_in_a_config_does_not_wait_for_torch(told) -> None:
    """Importing torch takes seconds; none of the commands did."""
    assert {line: slow for line, (_, _, _, slow) in told.items() if "torch" in slow or "transformers" in slow} == {}
    assert "neither an axis such as dp2" in told["verify", "run.yaml", "dp2·zz"][2]


_LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "RUN.yaml", "--run-dir", _LONG),
        ("train", "RUN.yaml", "--set", "data.path=fifo"),
        ("train", "RUN.yaml", "--set", "data.path=/dev/zero"),
        ("train", "RUN.yaml", "--set", "data.path=text.jsonl", "--set", "data.tokenizer=fifo"),
        ("train", "RUN.yaml", "--set", "data.path=text.jsonl", "--set", "data.tokenizer=/dev/zero"),
        ("train", "RUN.yaml", "--set", "parallel.dp=1000000", "--set", "train.global_batch_size=1000000"),
        ("config", "convert", _LONG),
        ("config", "convert", "fifo"),
        ("config", "convert", "/dev/zero"),
        ("data", "prepare", "text.jsonl", "--out", _LONG),
        ("data", "prepare", "fifo", "--out", "made"),
        ("data", "prepare", "text.jsonl", "--out", "made", "--vocab-size", str(10**12)),
        ("data", "prepare", "text.jsonl", "--out", "made", "--vocab-size", "300", "--workers", "0"),
        ("data", "prepare", "text.jsonl", "--out", "made", "--vocab-size", "300", "--workers", "1000000"),
        ("data", "show", _LONG),
        ("data", "show", ""),
        ("data", "show", "fifo"),
        ("data", "show", "TOKENS", "--sequence-length", "0"),
        ("data", "show", "TOKENS", "--sequence-length", str(10**12)),
        ("data", "show", "TOKENS", "--tokenizer", "fifo"),
        ("data", "show", "TOKENS", "--tokenizer", _LONG),
        ("data", "convert", "TOKENS", "--to", "megatron", "--out", _LONG),
        ("checkpoint", "export", _LONG, "--out", "made"),
        ("verify", "RUN.yaml", "--ranks", str(10**9)),
        ("verify", "RUN.yaml", "dp1000000"),
        ("verify", "RUN.yaml", "dp" + "9" * 20),
        ("verify", "RUN.yaml", "dp2", "--steps", str(10**12)),
    ],
    ids=lambda arguments: " ".join(word[:30] for word in arguments),
)
def test_hostile_arguments(
    threefold, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("text.jsonl").write_text(json.dumps({"text": "Some text."}) + "\n")
    Path("RUN.yaml").write_text(f"data: {{path: {tokens}, sequence_length: 16}}\n")
    before = sorted(tmp_path.rglob("*"))
    status, _, error = threefold(*(str(tokens) if word == "TOKENS" else word for word in arguments))
    assert status == 2
    assert "Error" in error
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before
