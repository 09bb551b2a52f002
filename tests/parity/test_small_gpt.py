"""The scoreboard's small GPT: its layouts equal one process, and mistakes put into it are found where they are."""

import sys

import pytest

from tests.support import ready

pytestmark = pytest.mark.slow

BOARD = [sys.executable, "-m", "benchmarks.parity", "--explain"]


@pytest.mark.parametrize(
    "layout",
    ["--tp 2", "--rotary*--tp 2 --sp --dp 2", "--experts*--tp 2 --ep 2", "--tied*--pp 2*"],
)
def test_layouts_without_a_mistake_equal_one_process(layout: str) -> None:
    ended = ready.run([*BOARD, "--layouts", "--only", layout])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Equal up to rounding in 3 steps" in ended.stdout


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("neox-1257", "norm.bias, which is each rank's own share: their sum would be right"),
        ("torchtitan-3174", "the gradient of embed.weight: it is 2 times the reference"),
        ("megatron-7576", "blocks.0.mlp.up.weight, which has 2 blocks along dim 0 interleaved"),
    ],
)
def test_mistakes_are_found_by_name_and_shape(bug: str, words: str) -> None:
    ended = ready.run([*BOARD, "--only", bug])
    assert "found True, name True, shape True" in ended.stdout, ended.stdout + ended.stderr
    assert words in " ".join(ended.stdout.split())
