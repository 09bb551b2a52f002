"""The stored tensors are the whole model's, once each, under the names of the unsplit model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.train.support import Run, train_rank
from threefold.checkpoint.index import read_index
from threefold.checkpoint.tensors import (
    Writer,
    load_tensors,
    read_chunk,
    save_tensors,
    save_tensors_alone,
    stored_tensors,
)
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.models.gpt.model import GPT
from threefold.parallel.leaf import local
from threefold.parallel.parameter import split_parameter
from threefold.resilience.heartbeat import PageHeartbeat
from threefold.verify.worker_pool import WorkerPool


def stored(folder: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint, read without knowing what should be there."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(folder).items()}
    load_tensors(tensors, folder, alone=True)
    return tensors


def saved_in(pool: WorkerPool, run: Run, folder: Path) -> dict[str, Tensor]:
    pool.run(run.world_size, train_rank, run.but(steps=2), folder)
    return stored(folder / "checkpoints" / "step_00000002")


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (1, 3, 1)])
def test_the_layout_is_not_part_of_the_format(
    pool: WorkerPool, small_run: Run, tmp_path: Path, dp: int, tp: int, pp: int
) -> None:
    run = small_run.but(dtype="fp64", set=(("model.num_attention_heads", 6),))
    one = saved_in(pool, run, tmp_path / "one")
    split = saved_in(pool, run.but(dp=dp, tp=tp, pp=pp), tmp_path / "split")
    assert split.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_names_are_those_of_the_unsplit_model(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """A tied weight is stored once, also where two stages hold it."""
    names = set(saved_in(pool, small_run.but(tp=2, pp=2), tmp_path))
    with torch.device("meta"):
        weights = {name for name, _ in GPT(small_run.config.model).named_parameters()}
    assert names == {f"model.{name}" for name in weights} | {
        f"optimizer.{name}.{state}" for name in weights for state in ("exp_avg", "exp_avg_sq", "step")
    }
    assert not any("head.output" in name for name in names)


def test_weights_are_stored_wide(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    tensors = saved_in(pool, small_run.but(dtype="bf16", tp=2), tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    weight = tensors["model.blocks.0.mlp.up.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())


def test_a_missing_name_and_another_shape_are_told(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    saved_in(pool, small_run, tmp_path)
    folder = tmp_path / "checkpoints" / "step_00000002"
    for name, shape in (("model.nonsense", (2,)), ("model.head.norm.bias", (23,))):
        with pytest.raises(UserError, match=name):
            load_tensors({name: torch.empty(shape)}, folder, alone=True)


def save_rows(rows: int, folder: Path) -> None:
    """Save a table of so many rows, split over all ranks."""
    mesh = Mesh(Layout(tp=dist.get_world_size()))
    save_tensors({"table": split_parameter(table(rows), (mesh.tp, 0))}, folder, mesh.world)


def load_rows(rows: int, folder: Path) -> Tensor:
    mesh = Mesh(Layout(tp=dist.get_world_size()))
    parameter = split_parameter(torch.zeros(rows, 2), (mesh.tp, 0))
    load_tensors({"table": parameter}, folder)
    return local(parameter).detach()


def table(rows: int) -> Tensor:
    return torch.arange(rows * 2.0).view(rows, 2)


def test_a_rank_may_hold_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    """Nine rows over four ranks are 3, 3, 3 and none."""
    pool.run(4, save_rows, 9, tmp_path)
    assert torch.equal(stored(tmp_path)["table"], table(9))
    for ranks in (2, 4):
        assert torch.equal(torch.cat(pool.run(ranks, load_rows, 9, tmp_path)), table(9))


def test_what_is_written_and_read_is_progress_block_by_block(tmp_path: Path) -> None:
    """So that a rank with a slow disk, for which the others wait, is not taken to hang."""
    heartbeat, blocks = PageHeartbeat(), 9
    tensor = torch.arange(blocks << 20, dtype=torch.float32)  # 36 MiB: nine blocks, and two parts to wait for
    save_tensors_alone({"a": tensor}, tmp_path, Writer(tmp_path, heartbeat))
    assert heartbeat.progressed >= blocks + 2
    index = read_index(tmp_path)
    (chunk,) = index["a"].chunks
    seen = []
    with (tmp_path / chunk.file).open("rb", buffering=0) as file:
        held = read_chunk(file, tmp_path, index["a"], chunk, lambda: seen.append(1))
    assert torch.equal(held, tensor)
    assert len(seen) == blocks
