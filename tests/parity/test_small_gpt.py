"""The scoreboard's small GPT: its layouts equal one process, and mistakes put into it are found where they are."""

import sys

import pytest

from tests.support import ready

pytestmark = pytest.mark.slow

BOARD = [sys.executable, "-m", "benchmarks.parity", "--explain"]


@pytest.mark.parametrize(
    "layout",
    [
        "--seed 1 --tp 2",
        "--rotary*--masked --seed 1 --tp 2 --sp --dp 2",
        "--experts*--dtype bfloat16 --seed 2 --tp 2 --ep 2",
        "--tied*--masked --seed 1 --pp 2*",
    ],
)
def test_layouts_without_a_mistake_equal_one_process(layout: str) -> None:
    ended = ready.run([*BOARD, "--layouts", "--only", layout])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Equal up to rounding in 3 steps" in ended.stdout


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    ended = ready.run([*BOARD, "--layouts", "--only", "--tp 3"])
    assert ended.returncode == 2
    assert "--only --tp 3 fits none of the titles, such as '--seed 1 --dp 2'" in ended.stderr


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("neox-1257", "norm.bias, which differs from rank to rank, and the sum over ranks would be right"),
        ("deepspeed-5170", "differs between ranks that hold copies: rank 1 from rank 0"),
        ("torchtitan-3174", "the gradient of embed.weight: it is 2 times the reference"),
        ("megatron-7576", "blocks.0.mlp.up.weight, which has 2 blocks along dim 0 interleaved"),
    ],
)
def test_mistakes_are_found_by_name_and_shape(bug: str, words: str) -> None:
    ended = ready.run([*BOARD, "--only", bug])
    assert "found True, name True, shape True" in ended.stdout, ended.stdout + ended.stderr
    assert words in " ".join(ended.stdout.split())
