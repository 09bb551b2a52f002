"""Memory of a rank of this machine, and a model that is too large for it, which is refused before it starts."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import custom_token_model, ready
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.host import memory
from threefold.launch.environment import LaunchedRank
from threefold.planner import fitting
from threefold.planner.fitting import memory_per_rank, require_memory
from threefold.planner.model_size import ModelSize

ADAMW = 16
"""Bytes of a weight, its gradient and two moments, in fp32."""


def config(model: dict[str, object] | None = None, **parallel: int) -> Config:
    sections = {
        "model": model or {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4},
        "data": {"path": "tokens", "sequence_length": 16},
        "parallel": parallel,
        "train": {"max_steps": 4, "global_batch_size": 8},
    }
    resolved = resolve(config_of(sections), 64)
    return resolved.model_copy(update={"train": resolved.train.model_copy(update={"device": "cpu"})})


def refusal(monkeypatch: pytest.MonkeyPatch, has: int, *arguments: object) -> str:
    monkeypatch.setattr(fitting, "memory", lambda: has - has // 3)
    monkeypatch.setattr(fitting, "swap", lambda: has // 3)
    try:
        require_memory(*arguments)  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("parallel", "copies"), [({}, 1), ({"dp": 4}, 4), ({"dp": 2, "pp": 2}, 2)])
def test_the_states_of_all_ranks_of_the_host_are_counted(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int], copies: int
) -> None:
    needed = ADAMW * copies * ModelSize(config()).parameters
    if "pp" in parallel:  # both stages have the tied embedding
        needed += ADAMW * copies * 64 * 32
    assert refusal(monkeypatch, needed, config(**parallel), None) == ""
    assert refusal(monkeypatch, needed - 1, config(**parallel), None).startswith("The weights, gradients and optimizer")


def test_ranks_of_other_hosts_need_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    given, needed = config(dp=4), ADAMW * ModelSize(config()).parameters
    assert refusal(monkeypatch, needed, given, LaunchedRank(3, 4, 0, 1)) == ""
    assert "of 2 ranks take" in refusal(monkeypatch, needed, given, LaunchedRank(2, 4, 0, 2))


def test_ranks_of_this_host_are_those_that_the_launcher_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has the positions too, so that its rank needs more than that of the last."""
    given = config(pp=2)
    size = ModelSize(given)
    first, last = (size.largest_rank(rank).bytes for rank in (0, 1))
    assert last < first
    assert refusal(monkeypatch, last, given, LaunchedRank(1, 2, 0, 1)) == ""
    assert refusal(monkeypatch, last, given, LaunchedRank(0, 2, 0, 1)).startswith("The weights, gradients and")


def test_a_custom_model_needs_its_states_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    own = config({"architecture": "own", "file": f"{custom_token_model.__file__}:Tiny"}, dp=2)
    assert refusal(monkeypatch, 2 * ADAMW * 1000, own, None, (1000, 1000)) == ""
    assert "of 2 ranks take" in refusal(monkeypatch, 2 * ADAMW * 1000 - 1, own, None, (1000, 1000))
    assert (
        refusal(monkeypatch, 2 * (ADAMW * 10 + 4 * 990), own, None, (1000, 10)) == ""
    )  # of those frozen, weights alone
    assert "of 2 ranks take" in refusal(monkeypatch, 2 * (ADAMW * 10 + 4 * 990) - 1, own, None, (1000, 10))


def test_a_run_is_refused_before_it_starts(tokens: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(
        f"data: {{path: {tokens}, sequence_length: 16}}\n"
        "model: {num_layers: 80, hidden_size: 16384, num_attention_heads: 128}\n"
        "parallel: {dp: 2}\n"
        "train: {max_steps: 4, global_batch_size: 4, device: cpu}\n"
    )
    run = tmp_path / "run"
    ended = ready.run([sys.executable, "-m", "threefold", "train", path, "--run-dir", run])
    assert ended.returncode == 2
    assert re.fullmatch(
        r"Error: The weights, gradients and optimizer state of 2 ranks take 8,2[0-9]{2}\.[0-9] GB, more than the "
        r"[0-9.,]+ GB of memory that this machine has for them; use parallel\.zero 3, fewer replicas "
        r"\(parallel\.dp\), a smaller model \(model\.num_layers, model\.hidden_size\) or more machines\.\n",
        ended.stderr,
    )
    assert not run.exists()


def test_ranks_share_the_memory_of_a_host() -> None:
    one, four = memory_per_rank("cpu", 1), memory_per_rank("cpu", 4)
    assert 0 < four < one < memory()
    assert memory_per_rank("cpu", 4) == four  # whatever is in use just now
    assert memory_per_rank("cpu", 10**6) == 0


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([80 << 30, 40 << 30] * 4)
    monkeypatch.setattr(fitting, "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=next(sizes)))
    of_one, of_two, of_three, of_eight = (memory_per_rank("cuda", ranks) for ranks in (1, 2, 3, 8))
    own = 1 << 30
    assert of_one == of_two == int(0.7 * (40 << 30)) - own
    assert of_three == int(0.7 * (40 << 30) / 2) - own, "two ranks share one of the GPUs"
    assert of_eight == int(0.7 * (40 << 30) / 4) - own
