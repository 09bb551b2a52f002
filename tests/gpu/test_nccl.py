"""World size 1 over NCCL: what a run on GPUs makes and calls, as far as one rank goes; several need as many GPUs.

On the CPU the same over gloo.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.devices import DEVICES, alone_on, device_of
from tests.support.parity import Case, make_engine, shard_of
from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.resilience.background_saving import background_axis


def collectives(device: str) -> None:
    """Those that an axis calls, which with one rank it would leave out."""
    where = device_of(device)
    own = torch.arange(12.0, device=where)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        tensor = own.to(dtype)
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            summed = tensor.clone()
            dist.all_reduce(summed, op=operation)
            assert summed.equal(tensor)
        work = dist.all_reduce(summed, async_op=True)
        assert work is not None
        work.wait()
        parts = [torch.empty_like(tensor)]
        dist.all_gather(parts, tensor)
        assert parts[0].equal(tensor)
        for call in (dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all_single):
            into = torch.empty_like(tensor)
            call(into, tensor)
            assert into.equal(tensor)
        dist.broadcast(summed, 0)
        assert summed.equal(tensor)
    found: list[object] = [None]
    dist.all_gather_object(found, {"rank": 0})
    assert found == [{"rank": 0}]
    dist.barrier()
    wait = torch.ops._c10d_functional.wait_tensor
    name = dist.group.WORLD.group_name
    assert wait(torch.ops._c10d_functional.all_reduce(own, "sum", name)).equal(own)
    on_host = torch.ones(3)
    dist.all_reduce(on_host)
    assert on_host.eq(1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_collectives(pool, device: str) -> None:
    pool.run(1, alone_on, device, collectives, device)


def axes(device: str) -> list[str]:
    mesh = Mesh(Layout(), device_of(device))
    axis = Axis("new", (0,), 0, dist.new_group([0]), mesh.recorder)
    assert axis.all_reduce_values(torch.tensor([1.0, 2.0], device=mesh.device)) == [1, 2]
    assert background_axis(mesh.world, mesh.heartbeat).gather_objects("x") == ["x"]
    assert mesh.check_group is mesh.world
    mesh.world.barrier()
    return [mesh.device.type, mesh.device_mesh.device_type]


@pytest.mark.parametrize("device", DEVICES)
def test_a_mesh(pool, device: str) -> None:
    assert pool.run(1, alone_on, device, axes, device) == [[device, device]]


def losses(case: Case) -> list[float]:
    engine = make_engine(case)
    return [engine.train_step(shard_of(case, step, 0), step).loss for step in range(3)]


@pytest.mark.parametrize("device", DEVICES)
def test_training_falls(pool, device: str) -> None:
    case = Case(dtype="bf16", dropout=0.1)
    (expected,) = pool.run(1, losses, replace(case, dtype="fp32"))
    (found,) = pool.run(1, alone_on, device, losses, replace(case, device=device))
    assert found == pytest.approx(expected, rel=1.5e-2)
