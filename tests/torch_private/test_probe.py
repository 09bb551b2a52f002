"""The check of another torch than the tested one: each private part that it lacks is named before a run starts."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import _PipelineStageBase

from threefold.errors import UserError
from threefold.torch_private.probe import TESTED, missing_parts, named_parts, require_parts

ROOT = Path(__file__).parents[2]


def test_the_parts_are_those_that_the_files_name() -> None:
    """One of each way to name a part: imports, attributes, operators, annotated arguments, overridden methods."""
    expected = {
        "torch.distributed.fsdp._fully_shard._fsdp_api",
        "torch._foreach_norm",
        "torch.ops.mkldnn._linear_pointwise",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "torch.nn.Module._non_persistent_buffers_set",
        "torch.distributed.pipelining.PipelineStage._setup_backward_recv_info",
        "torch._dynamo.callback.on_compile_start",
    }
    assert expected <= {part for part, _ in named_parts()}
    assert list(missing_parts()) == []


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (torch, "_foreach_norm", "torch._foreach_norm"),
        (DeviceMesh, "_flatten", "torch.distributed.device_mesh.DeviceMesh._flatten"),
        (_PipelineStageBase, "_setup_backward_recv_info", "torch.distributed.pipelining.PipelineStage._setup_backward"),
    ],
)
def test_a_part_that_is_gone_is_named(owner: object, name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        UserError, match=rf"^torch 2\.13\.1 has no {part}\w*, which Threefold uses; install the release"
    ):
        require_parts("2.13.1")
    require_parts(f"{TESTED}+cu130")  # the canaries speak for it


def test_the_tested_release_is_this_one_and_among_those_that_are_installed() -> None:
    assert torch.__version__.partition("+")[0] == TESTED, "run the canaries with it, then change TESTED"
    (wanted,) = (
        each
        for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if each.startswith("torch")
    )
    assert wanted == f"torch>={TESTED}a0,<2.14"


@pytest.mark.slow
def test_a_command_says_it_in_one_sentence(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "torch.__version__ = '2.13.1'\n"
        "del torch._foreach_norm\n"
        f"sys.argv = ['threefold', 'verify', {str(ROOT / 'examples' / 'laptop.yaml')!r}]\n"
        "from threefold.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("Error: torch 2.13.1 has no torch._foreach_norm, which Threefold uses; install ")
