"""`threefold estimate`: its tables, its JSON document, and its errors."""

import json
from pathlib import Path

import pytest

CONFIG = """
model: {preset: llama-3.1-8b}
data: {path: nowhere, sequence_length: 8192}
parallel: {dp: 2, tp: 2, pp: 2, zero: 1}
train: {global_batch_size: 32, micro_batch_size: 1, recompute: full}
precision: {dtype: bf16}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_tables(threefold, config: Path, tmp_path: Path) -> None:
    status, output, error = threefold("estimate", config, "--hardware", "h100")
    assert (status, error) == (0, "")
    assert output.startswith("dp 2 · tp 2 · pp 2, 8 × NVIDIA H100 SXM 80 GB, bf16.\nStep: ")
    for text in (
        "tokens/s",
        "MFU",
        "with recompute",
        "As with own",
        "matrix products",
        "pp rank",
        "Fits: ",
    ):
        assert text in output
    assert "own kernels" not in output
    named = threefold("estimate", config, "--hardware", "h100", "--system", "nemo").output
    assert "As with nemo" in named
    step = output.split("Step: ")[1].split(" (")[0]
    assert f"With this package's own kernels: {step} a step" in named
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]
    peak = json.loads(threefold("estimate", config, "--hardware", "h100", "--json").output)["peak_bytes"][0]
    unit, scale = ("GB", 1e9) if peak >= 2e9 else ("MB", 1e6)
    assert f"{unit} of each pp rank" in output
    assert f" {peak / scale:.1f} " in output


def test_the_memory_of_a_small_model_is_not_rounded_to_nothing(threefold, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        "{data: {path: x, sequence_length: 64}, model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, "
        "vocab_size: 1024}, train: {global_batch_size: 4}}"
    )
    output = threefold("estimate", path, "--hardware", "h100").output
    assert "MB of each pp rank" in output
    assert ("working: " in output) == ("   working" in output)  # a column is explained where it is
    row = next(line for line in output.splitlines() if line.split()[:1] == ["0"])
    assert all(float(size) > 0 for size in row.split()[1:])


def test_the_json_document(threefold, config: Path) -> None:
    status, output, _ = threefold(
        "estimate", config, "--hardware", "a100-80", "--json", "--set", "train.recompute=none"
    )
    assert status == 0
    document = json.loads(output)
    assert document["step_seconds"] == pytest.approx(sum(document["seconds"].values()))
    assert len(document["peak_bytes"]) == 2
    low, high = document["error_band"]
    assert low < document["step_seconds"] < high
    assert 0.2 < document["mfu"] < 0.7
    _, slower, _ = threefold("estimate", config, "--hardware", "a100-80", "--json", "--system", "own")
    assert json.loads(slower)["step_seconds"] > document["step_seconds"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--hardware is missing; give the path of a YAML file or one of v100, "),
        (("--hardware", "h1000"), "The hardware h1000 is unknown; .* the nearest is h100"),
        (("--hardware", "lab.yaml"), "Cannot read the hardware entry lab.yaml: No such file"),
        (("--hardware", "h100", "--system", "nemmo"), "training system nemmo is unknown; .* the nearest is nemo"),
        (("--hardware", "h100", "--set", "parallel.dp=4", "--set", "parallel.tp=3"), "tp is 3"),
        (
            ("--hardware", "h100", "--set", "parallel.dp=3", "--set", "train.global_batch_size=33"),
            "nodes of h100 have 8 .*; use 2",
        ),
        (("--hardware", ""), "The hardware '' is unknown; give the path"),
        (("--hardware", "v100"), "v100 has no matrix rate for bf16; use one of fp16"),
    ],
)
def test_mistakes_are_one_sentence(threefold, config: Path, arguments: tuple[str, ...], sentence: str) -> None:
    import re

    status, output, error = threefold("estimate", config, *arguments)
    assert (status, output) == (2, "")
    assert re.search(sentence, error)
    assert error.count("\n") == 1
