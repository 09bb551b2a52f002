"""The package stands on its own: it needs PyTorch, numpy and rich, whose private parts do what they are used for."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from parity_support import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import threefold_parity
from threefold_parity.torch_private import in_backward_pass, local_box, persistent_buffers

PACKAGE = Path(threefold_parity.__file__).parent
ALLOWED = {"threefold_parity", "torch", "numpy", "rich", *sys.stdlib_module_names}
OF_A_FRAMEWORK = {"transformers.py": {"transformers"}}
"""Modules that users of another package import."""


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_a_module_imports_what_the_package_depends_on(path: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set()
    assert {name.partition(".")[0] for name in names} <= ALLOWED | OF_A_FRAMEWORK.get(path.name, set())


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("left", torch.ones(1), persistent=False)
    assert [name for name, _ in persistent_buffers(module)] == list(module.state_dict()) == ["kept"]


def test_a_hook_of_the_backward_pass_runs_in_it() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda gradient: seen.append(in_backward_pass()))
    seen.append(in_backward_pass())
    y.sum().backward()
    assert [*seen, in_backward_pass()] == [False, True, False]


def boxes_make_up_the_tensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(35.0).view(7, 5)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        tensor = distribute_tensor(whole, mesh, placements)
        start, size, copies, partial = local_box(tensor)
        box = tuple(slice(at, at + extent) for at, extent in zip(start, size, strict=True))
        assert torch.equal(tensor.to_local(), whole[box])
        assert (copies, partial) == (mesh.get_local_rank("dp") if placements[0].is_replicate() else 0, False)
    summed = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()], run_check=False)
    assert local_box(summed)[3]


def test_the_box_of_a_shard() -> None:
    on_ranks(4, boxes_make_up_the_tensor)
