"""`threefold dry-run`: its tables, its JSON document, and its errors."""

import json
from pathlib import Path

import pytest
import yaml

from threefold.planner import hardware
from threefold.planner.stage_memory import RESERVE

CONFIG = """
model: {num_layers: 4, hidden_size: 16, num_attention_heads: 2, vocab_size: 64}
data: {path: nowhere, sequence_length: 8}
parallel: {tp: 2, pp: 2}
train: {global_batch_size: 8, gradient_accumulation_steps: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_tables_of_all_stages(threefold, config: Path, tmp_path: Path) -> None:
    status, output, error = threefold("dry-run", config, "--all-stages", "--world", "8", "--hardware", "h100")
    assert (status, error) == (0, "")
    assert output.startswith("Layout: dp 2 · tp 2 · pp 2, 8 ranks; fp32.\nOne step: 8 samples")
    assert "embed to blocks.1" in output
    assert "blocks.2 to head" in output
    assert "all_reduce_max" in output
    assert "; both fit into the 82.8 GB that tensors may have of NVIDIA H100" in output
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]


CUSTOM_MODEL = """
from torch import nn
from torch.nn import functional as F

import threefold as t3


class Two(nn.Module):
    plan = t3.Plan(layers=["embed", "head"])

    def __init__(self, vocab_size: int, inner: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(inner, vocab_size)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

    @staticmethod
    def loss(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())
"""


def test_a_model_of_ones_own(threefold, tmp_path: Path) -> None:
    """Its parameters are counted; shapes that do not go together are one sentence."""
    (tmp_path / "run.yaml").write_text("data: {path: none}\nmodel: {vocab_size: 64}\nparallel: {dp: 2}")
    (tmp_path / "two.py").write_text(CUSTOM_MODEL)
    status, output, error = threefold("dry-run", tmp_path / "run.yaml", "--model", f"{tmp_path}/two.py:Two", "--json")
    assert (status, error) == (0, "")
    assert json.loads(output)["ranks"][0]["parameters"] == 64 * 8 + 64 * 8 + 64
    (tmp_path / "nine.py").write_text(CUSTOM_MODEL.replace("inner: int = 8", "inner: int = 9"))
    status, output, error = threefold("dry-run", tmp_path / "run.yaml", "--model", f"{tmp_path}/nine.py:Two")
    assert (status, output) == (2, "")
    assert error.startswith("Error: The model fails on rank 0 with RuntimeError: ")
    assert error.count("\n") == 1
    status, _, error = threefold(
        "dry-run", tmp_path / "run.yaml", "--model", f"{tmp_path}/two.py:Two", "--set", "parallel.pp=2"
    )
    assert (status, error.count("\n")) == (2, 1)
    assert "parallel.pp is 2" in error


def test_the_json_document(threefold, config: Path) -> None:
    status, output, _ = threefold("dry-run", config, "--rank", "3", "--json")
    assert status == 0
    document = json.loads(output)
    (rank,) = document["ranks"]
    assert (document["world_size"], rank["rank"], rank["coordinates"]["pp"]) == (4, 3, 1)
    assert rank["peak_bytes"] == document["peak_bytes"] == sum(rank["causes"].values())
    assert list(rank["causes"]) == ["weights", "gradients", "optimizer", "activations", "fragmentation"]
    assert not {"at_peak", "activation_bytes"} & rank.keys()  # the same words for other bytes
    assert {each["axis"] for each in rank["collectives"]} == {"tp", "pp", "tie", "world"}
    assert rank["flops"] > 0


def test_a_gpu_is_judged_by_its_own_kernels_too(threefold, config: Path, tmp_path: Path) -> None:
    """The kernels of a CPU keep other tensors: where one of the two numbers fits only, no verdict is given."""
    entry = yaml.safe_load(Path(hardware.__file__).with_suffix(".yaml").read_text())["h100"]
    arguments = "dry-run", config, "--set", "precision.dtype=bf16", "--set", "model.hidden_size=512"

    def with_memory(nbytes: int) -> tuple[dict, str]:
        (tmp_path / "gpu.yaml").write_text(yaml.safe_dump({"gpu": entry | {"memory_bytes": RESERVE + nbytes}}))
        on = "--hardware", tmp_path / "gpu.yaml"
        found, line = threefold(*arguments, *on, "--json")[1], threefold(*arguments, *on)[1].splitlines()[-1]
        return json.loads(found), line

    document, line = with_memory(10**9)
    assert document["fits"] is True
    assert "; both fit into the 1.0 GB that tensors may have of" in line
    run, estimated = document["peak_bytes"], document["estimated_bytes"]
    assert estimated != run
    document, line = with_memory((run + estimated) // 2)
    assert document["fits"] is None
    assert f"; only the {'first' if run < estimated else 'second'} fits into the" in line
    document, line = with_memory(min(run, estimated) // 2)
    assert document["fits"] is False
    assert "; neither fits into the" in line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rank", "4"), "--rank is 4 but the layout has ranks 0 to 3; use 3."),
        (("--rank", "-1"), "--rank -1 must be at least 0; use 0."),
        (("--rank", "one"), "--rank one must be a whole number; use 0."),
        (("--rank", "1", "--all-stages"), "--rank is 1 and --all-stages is given too; give one of them."),
        (("--world", "7"), "--world is 7 but must be a multiple of tp · pp = 4; use 8."),
        (("--world", "0"), "--world 0 must be at least 1; use 1."),
        (
            ("--world", "12", "--set", "parallel.dp=2"),
            "--world is 12 but parallel.dp 2 makes a layout of 8 ranks; use --world 8, or --set parallel.dp=3.",
        ),
        (("--world", "99999999"), "--world 99999999 must be at most 1,000,000; use 1000000."),
        (("--world", "12"), "train.global_batch_size is 8 but must be a multiple of"),
        (("--hardware", "h10"), "h100"),
        (("--set", "parallel.pp=8"), "each stage needs a layer"),
    ],
)
def test_mistakes_are_one_sentence(threefold, config: Path, arguments: tuple[str, ...], sentence: str) -> None:
    status, output, error = threefold("dry-run", config, *arguments)
    assert (status, output) == (2, "")
    assert error.startswith("Error: ")
    assert sentence in error
    assert error.count("\n") == 1
