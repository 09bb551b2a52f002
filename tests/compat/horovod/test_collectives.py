"""Horovod's collectives: values, dtypes, gradients, asynchronous forms, and calls that differ between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import threefold as t3
import threefold.compat.horovod as hvd
from tests.support.sentences import sentence


def own(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([[1, -2, 3], [4, 5, -7]]).mul(hvd.rank() + 1).to(dtype)


def combined() -> dict[str, Tensor]:
    hvd.init()  # of ranks that have met
    found = {op.value: hvd.allreduce(own(), op=op) for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)}
    found["mean"] = hvd.allreduce(own(), name="mean")
    found["old sum"] = hvd.allreduce(own(), average=False)
    found["integers"] = hvd.allreduce(own(torch.int64) + hvd.rank() % 2)
    found["scaled"] = hvd.allreduce(own(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    found["narrow"] = hvd.allreduce(own(torch.float32), compression=hvd.Compression.fp16)
    found["scalar"] = hvd.allreduce(torch.tensor(hvd.rank() + 1.0))
    turned = own().t()
    assert hvd.allreduce_(turned) is turned
    assert not turned.is_contiguous()
    found["in place"] = turned.t()
    given = own()
    handle = hvd.allreduce_async(given, op=hvd.Sum)
    found["async"], found["given"] = hvd.synchronize(handle), given
    assert hvd.poll(handle)
    parameter = torch.nn.Parameter(own())
    hvd.synchronize(hvd.allreduce_async_(parameter, name="weights"))
    found["parameter"] = parameter.detach()
    found["grouped"] = torch.stack(hvd.grouped_allreduce([own(), own()], name="group"))
    found["grouped in place"] = torch.stack(hvd.grouped_allreduce_([own(), own()], op=hvd.Sum))
    hvd.barrier()
    return found


def test_combinations(pool) -> None:
    base = torch.tensor([[1, -2, 3], [4, 5, -7]]).double()
    found, other, third = pool.run(3, combined)
    for each in (other, third):
        assert all(torch.equal(found[name], each[name]) for name in found if name != "given")
    assert torch.equal(found["Average"], base * 2)
    assert torch.equal(found["mean"], base * 2)
    assert torch.equal(found["Sum"], base * 6)
    assert torch.equal(found["old sum"], base * 6)
    assert torch.equal(found["Min"], torch.minimum(base, base * 3))
    assert torch.equal(found["Max"], torch.maximum(base, base * 3))
    assert torch.equal(found["Product"], base**3 * 6)
    # Sums that three do not divide: 7, -11, 19, 25, 31 and -41, whose means are truncated, not rounded down.
    assert found["integers"].tolist() == [[2, -3, 6], [8, 10, -13]]
    assert found["integers"].dtype == torch.int64
    assert torch.equal(found["scaled"], base * 12)
    assert torch.equal(found["narrow"], base.float() * 2)
    assert found["narrow"].dtype == torch.float32
    assert found["scalar"].item() == 2.0
    assert torch.equal(found["in place"], base * 2)
    assert torch.equal(found["async"], base * 6)
    assert torch.equal(found["given"], base)
    assert torch.equal(found["parameter"], base * 2)
    assert torch.equal(found["grouped"], torch.stack([base * 2] * 2))
    assert torch.equal(found["grouped in place"], torch.stack([base * 6] * 2))


def gathered() -> tuple[Any, ...]:
    rank = hvd.rank()
    rows = torch.arange(rank + 1) + 10 * rank
    later = hvd.allgather_async(rows)
    flags = torch.tensor([rank == 1, True])
    hvd.broadcast_(flags, root_rank=1, name="flags")
    handle = hvd.broadcast_async_(torch.full((2,), float(rank)), root_rank=2)
    return (
        hvd.allgather(rows).tolist(),
        hvd.synchronize(later).tolist(),
        hvd.broadcast(torch.tensor(rank + 5), root_rank=2, name="resume").item(),
        hvd.synchronize(handle).tolist(),
        flags.tolist(),
        hvd.broadcast_object({"of": rank}, root_rank=1),
        hvd.allgather_object({"of": rank}),
        (hvd.size(), hvd.local_rank() == rank, hvd.local_size(), hvd.is_initialized(), hvd.mpi_built()),
    )


def test_gathers_and_broadcasts(pool) -> None:
    rows = [0, 10, 11, 20, 21, 22]
    objects = [{"of": rank} for rank in range(3)]
    expected = (rows, rows, 7, [2.0, 2.0], [True, True], {"of": 1}, objects, (3, True, 3, True, False))
    assert pool.run(3, gathered) == [expected] * 3


def gradients() -> list[Tensor]:
    found = []
    weights = torch.arange(1.0, 7.0).mul(hvd.rank() + 1)
    for call in (
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16),
        lambda x: hvd.allgather(x)[: len(weights)],
        lambda x: hvd.broadcast(x, root_rank=1),
    ):
        x = torch.ones(3 if found and len(found) == 2 else 6, requires_grad=True)
        (call(x) * weights).sum().backward()
        found.append(x.grad)
    return found


def test_gradients_are_those_of_horovod(pool) -> None:
    base = torch.arange(1.0, 7.0)
    for rank, (total, mean, joined, root) in enumerate(pool.run(2, gradients)):
        assert torch.equal(total, base * 3)
        assert torch.equal(mean, base * 1.5)
        assert torch.equal(joined, (base * 1.5)[3 * rank : 3 * rank + 3])
        assert torch.equal(root, base * 1.5 if rank == 1 else torch.zeros(6))


def wrong_calls() -> list[str]:
    rank, x = hvd.rank(), torch.ones(2)
    grad = torch.ones(2, requires_grad=True)
    calls = [
        lambda: hvd.allreduce(x, name="loss" if rank else "accuracy"),
        lambda: hvd.allreduce(torch.ones(2 + rank)),
        lambda: hvd.allreduce(x) if rank else hvd.broadcast(x, root_rank=0),
        lambda: hvd.allreduce(x, op=hvd.Adasum),
        lambda: hvd.allreduce(x, op="mean"),
        lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        lambda: hvd.allreduce(x, compression="zip"),
        lambda: hvd.allreduce(grad, op=hvd.Max),
        lambda: hvd.allreduce(3.0),
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.broadcast(x, root_rank=2),
        lambda: hvd.allreduce(x, process_set=[0]),
        lambda: hvd.synchronize(3),
        lambda: hvd.init([0, 1]),
        lambda: hvd.join(),
    ]
    said = [sentence(call) for call in calls]
    with pytest.raises(AttributeError, match="Horovod's alltoall has no counterpart here; use all_to_all of an axis"):
        _ = hvd.alltoall
    return said


def test_wrong_calls_are_one_sentence(pool) -> None:
    said = pool.run(2, wrong_calls)
    another = "while another rank made another call; make the same calls in the same order on all ranks."
    assert said[0][:3] == [
        f"Rank 0 called hvd.allreduce 'accuracy' torch.float32 (2,) ReduceOperation.AVERAGE {another}",
        f"Rank 0 called hvd.allreduce torch.float32 (2,) ReduceOperation.AVERAGE {another}",
        f"Rank 0 called hvd.broadcast torch.float32 (2,) 0 {another}",
    ]
    assert (
        said[0][3:]
        == said[1][3:]
        == [
            "op is Adasum, which has no counterpart; use hvd.Average.",
            "op is 'mean' but must be one of hvd.Average, Sum, Min, Max and Product; use hvd.Average.",
            "average is True and op is ReduceOperation.SUM, which say the same thing twice; leave out average.",
            "compression is 'zip' but must be one of Compression.none, Compression.fp16 and Compression.bf16; use "
            "Compression.fp16.",
            "op is Max but the tensor needs a gradient, which only Average and Sum have; use tensor.detach().",
            "allreduce was given a float but needs a tensor; use torch.tensor(value).",
            "allgather was given a tensor without a dim to concatenate along; use tensor.reshape(1).",
            "root_rank is 2 but the world has the ranks 0 to 1; use 0.",
            "process_set is given but collectives are over all ranks; leave it out.",
            "handle is of the type int but must be what an asynchronous call returned; use handle = "
            "hvd.allreduce_async(tensor).",
            "hvd.init was given a part of the ranks, but it takes all of them; call it without arguments.",
            "hvd.join has no counterpart, as all ranks make the same number of steps; use torch's DistributedSampler, "
            "which gives them equally many samples.",
        ]
    )


@pytest.fixture
def no_group() -> None:
    """End the process group of one rank that other files' tests may have left in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group")
def test_without_a_process_group_there_are_no_ranks() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.local_rank, lambda: hvd.broadcast_object(1)):
        with pytest.raises(t3.UserError, match=r"torch.distributed is not initialised.*; call hvd.init\(\) first"):
            call()


@pytest.mark.usefixtures("no_group")
def test_ranks_of_mpirun_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(t3.UserError, match=r"OMPI_COMM_WORLD_SIZE is 4.*; start it with `torchrun --nproc-per-node 4"):
        hvd.init()
    assert not dist.is_initialized()
