"""A canary for each private part of torch that the package leans on: what torch has changed, in a sentence."""

import ast
import ctypes
import gc
import hashlib
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

ROOT = Path(__file__).parents[1]


def test_every_part_has_a_canary() -> None:
    """By name: each of `threefold/torch_private/` is used by one of the tests here, or of its own room."""
    names: set[str] = set()
    for file in ("tensors", "distributed"):  # tests/torch_private/ has the others
        for node in ast.parse((ROOT / f"threefold/torch_private/{file}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                names.add(ast.unparse(target))
    assert {"assert_async", "StridedPlacement", "ChunkedTensor", "NO_TORCH_FUNCTION", "finish_backward"} <= names
    text = "".join(file.read_text() for file in (Path(__file__), ROOT / "tests/torch_private/test_tensors.py"))
    public = {name for name in names if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"\b{name}\b", text)} == set()


def test_assert_async() -> None:
    from threefold.torch_private.tensors import assert_async

    assert_async(torch.tensor(True), "fine")
    said = ""
    try:
        assert_async(torch.tensor(False), "the label is wrong")
    except RuntimeError as error:
        said = str(error)
    assert "the label is wrong" in said, "torch._assert_async no longer raises its message for a false scalar on a CPU"


def test_a_process_group_of_python(pool) -> None:
    """Torch takes one in place of a backend, calls its methods, and waits for the work that they return."""
    pool.run(1, _in_a_group_of_python)


def _in_a_group_of_python() -> None:
    from threefold.torch_private.distributed import PythonGroup, Work, default_store, with_gloo

    called: list[str] = []

    class Doubling(Work):
        def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
            super().__init__()
            self.work, self.tensor = work, tensor

        def wait(self, timeout: object = None) -> bool:
            self.work.wait()
            self.tensor.mul_(2)
            return True

    class Group(PythonGroup):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(rank, size)
            self.gloo = with_gloo(self, store, rank, size, timeout)

        def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
            called.append("allreduce")
            return Doubling(self.gloo.allreduce(tensors, opts), tensors[0])

    store = default_store()
    dist.destroy_process_group()
    dist.Backend.register_backend("python_group", Group, devices=["cpu"])
    dist.init_process_group("python_group", store=dist.PrefixStore("python", store), rank=0, world_size=1)
    group = dist.group.WORLD
    assert isinstance(group, Group), "torch no longer takes a process group of Python in place of a backend"
    assert [device.type for device in group._device_types] == ["cpu"], "_register_backend no longer adds a device"
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2], "torch no longer waits for the work that a process group of Python returns"
    functional = torch.ops._c10d_functional
    summed = functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group.group_name))
    assert summed.tolist() == [2, 2], "functional collectives no longer reach a process group of Python"
    assert called == ["allreduce"] * 2


def test_a_process_group_that_stands_in(pool) -> None:
    """What its class defines is called with options that say whether to wait; gloo serves the rest."""
    pool.run(2, _in_a_group_that_stands_in)


def _in_a_group_that_stands_in() -> None:
    from threefold.torch_private.distributed import (
        BLOCKING_GATHER,
        BLOCKING_MAX,
        BLOCKING_SCATTER,
        BLOCKING_SUM,
        PythonGroup,
        stand_in,
        withdraw,
    )

    seen: list[bool] = []

    class Group(PythonGroup):
        def __init__(self, gloo: dist.ProcessGroup) -> None:
            super().__init__(gloo.rank(), gloo.size())
            stand_in(self, gloo)
            self.gloo = gloo

        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
            seen.append(opts.asyncOp)
            assert opts.reduceOp == dist.ReduceOp.MAX
            return self.gloo.allreduce(tensors, opts)

    group, tensor, own = Group(dist.group.WORLD), torch.ones(2), torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    group.allreduce([tensor], BLOCKING_MAX).wait()
    assert seen == [False, False], "the options of a collective no longer say whether it waits"
    assert BLOCKING_SUM.reduceOp == dist.ReduceOp.SUM, "AllreduceOptions no longer have the operation"
    group.all_gather_single(tensor, own, BLOCKING_GATHER).wait()
    assert tensor.tolist() == [0, 1], "a process group of Python no longer passes on what it does not define"
    group.reduce_scatter_single(own, tensor, BLOCKING_SCATTER).wait()
    assert own.item() == 2 * dist.get_rank(), "ReduceScatterOptions no longer sum"
    dist.broadcast(tensor, 1, group)
    assert dist.get_process_group_ranks(group) == [0, 1], "pg_group_ranks no longer has the ranks of a group"
    assert dist.get_backend(group) == "gloo", "pg_map no longer has the name of a group's backend"
    known = dist.distributed_c10d._get_all_pg_configs()  # as torch's profiler reads them
    assert [each["ranks"] for each in known] == [[0, 1], [0, 1]], "pg_backend_config no longer has a group's backends"
    kept = weakref.ref(group)
    withdraw(group)
    del group
    gc.collect()
    assert kept() is None, "torch keeps a group elsewhere than in pg_map, pg_group_ranks and pg_backend_config"


def test_nccl_records() -> None:
    """Without NCCL there are none, and where it is there torch has a name for them."""
    from threefold.torch_private.distributed import nccl_records

    if not dist.is_nccl_available():
        assert nccl_records() is None
    else:
        assert isinstance(nccl_records(), bytes), "torch._C._distributed_c10d._dump_nccl_trace is no longer there"


def test_foreach() -> None:
    from threefold.torch_private.tensors import foreach_copy_, foreach_mul_, foreach_norm

    tensors, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), -2.0)]
    foreach_copy_(tensors, sources)
    assert all(map(torch.equal, tensors, sources)), "torch._foreach_copy_ no longer copies each tensor in place"
    foreach_mul_(tensors, 2.0)
    assert tensors[1].tolist() == [-4.0] * 3, "torch._foreach_mul_ no longer multiplies each tensor in place"
    norms = foreach_norm([torch.full((16,), 3.0, dtype=torch.float16)], dtype=torch.float32)
    assert norms[0].dtype == torch.float32, "torch._foreach_norm no longer takes a dtype to add up in"
    assert norms[0].item() == 12
    assert foreach_norm(tensors, torch.inf)[1].item() == 4, "torch._foreach_norm no longer takes an order"


def test_onednn_linear() -> None:
    from threefold.torch_private.tensors import onednn_linear

    x, weight, bias = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((4, 8), (8, 5), (5,))
    )
    got = onednn_linear(x, weight.t(), bias)
    expected = nn.functional.linear(x, weight.t(), bias)
    torch.testing.assert_close(
        got, expected, msg="torch.ops.mkldnn._linear_pointwise no longer computes F.linear of a transposed view"
    )


def test_storage_key() -> None:
    from threefold.torch_private.tensors import storage_key

    base, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    said = "UntypedStorage._cdata no longer tells which meta tensors share memory"
    assert storage_key(base) == storage_key(base[1:]), said
    assert storage_key(base) != storage_key(other), said
    assert storage_key(base) == storage_key(base.untyped_storage()), said


def test_child_names() -> None:
    from threefold.torch_private.tensors import child_names

    module = nn.Module()
    module.first = module.second = nn.Linear(1, 1)
    assert list(child_names(module)) == ["first", "second"], "Module._modules no longer holds every name of a child"


def test_share_contents() -> None:
    from threefold.torch_private.distributed import share_contents

    module, other = nn.Module(), nn.Sequential(nn.Linear(1, 1))
    share_contents(module, other)
    other.append(nn.Linear(1, 1))
    other.scale = nn.Parameter(torch.ones(1))
    other.register_buffer("offset", torch.ones(1))
    assert list(module.state_dict()) == list(other.state_dict()), (
        "a Module no longer keeps parameters, buffers and submodules in _parameters, _buffers and _modules"
    )


def test_no_torch_function() -> None:
    from threefold.torch_private.distributed import NO_TORCH_FUNCTION

    class Part(torch.Tensor):
        __torch_function__ = NO_TORCH_FUNCTION

    part = torch.ones(2).as_subclass(Part)
    assert type(part + 1) is torch.Tensor, "torch._C._disabled_torch_function_impl no longer gives plain tensors"


def test_fresh_parameter(pool) -> None:
    """What `nn.Parameter` makes of a `DTensor`, but that `DTensor` itself."""
    pool.run(1, _make_a_fresh_parameter)


def _make_a_fresh_parameter() -> None:
    from threefold.torch_private.distributed import fresh_parameter

    stored = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)
    made = fresh_parameter(stored)
    message = "torch no longer marks parameters of other classes by _is_param"
    assert made is stored, message
    assert isinstance(made, nn.Parameter), message
    assert (made.requires_grad, made.is_leaf) == (True, True), message
    module = nn.Module()
    module.weight = made
    assert list(module.parameters()) == [made], message
    plain = torch.ones(2)
    assert type(fresh_parameter(plain)) is nn.Parameter
    assert vars(
        nn.Parameter(DTensor.from_local(torch.ones(3), stored.device_mesh, [Shard(0)], run_check=False))
    ).keys() <= (vars(made).keys()), "torch marks parameters of other classes by something more"


def test_shards_of_a_subclass(pool) -> None:
    """`shard_of` and `split_like`, beside what the documented functions of `DTensor` give."""
    pool.run(2, _wrap_shards)


def _wrap_shards() -> None:
    from threefold.torch_private.distributed import shard_of, split_like

    class Part(DTensor):
        pass

    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    shard = torch.arange(6.0)[3 * rank :][: 3 - rank]  # five elements, of which the second rank has two
    stored = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))
    assert shard_of(stored).data_ptr() == shard.data_ptr(), "DTensor keeps its shard elsewhere"
    made = split_like(Part, shard.double(), stored)
    message = "a DTensor is no longer made of a shard and a specification"
    assert (type(made), made.shape, made.dtype, made.placements) == (Part, (5,), torch.float64, (Shard(0),)), message
    assert torch.equal(DTensor.full_tensor(made), stored.full_tensor().double()), message


def test_tensors_in_values() -> None:
    from threefold.torch_private.tensors import map_tensors, tensors_in

    one, other = torch.ones(1), torch.zeros(2)
    values = ([one, 3], {"key": (other, None)})
    assert [id(each) for each in tensors_in(values)] == [id(one), id(other)], "torch.utils._pytree visits otherwise"
    assert map_tensors(len, values) == ([1, 3], {"key": (2, None)}), "torch.utils._pytree maps otherwise"


def test_local_box(pool) -> None:
    """Uneven shards, and a dim that two axes shard: the boxes of all ranks make up the tensor."""
    parts = pool.run(4, _parts_of_a_tensor)
    for start, size, values in (part[0] for part in parts):
        box = tuple(slice(at, at + extent) for at, extent in zip(start, size, strict=True))
        expected = torch.arange(35.0).view(7, 5)[box]
        assert torch.equal(values, expected), "compute_local_shape_and_global_offset no longer gives the rank's box"
    assert sum(part[0][2].numel() for part in parts) == 35
    assert [part[1] for part in parts] == [(0, False), (1, False), (0, False), (1, False)]
    assert [part[2] for part in parts] == [True] * 4


def _parts_of_a_tensor() -> tuple[Any, ...]:
    from threefold.torch_private.distributed import StridedPlacement, local_box

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(35.0).view(7, 5)
    rows = whole.chunk(2)[mesh.get_local_rank("tp")]
    mine = rows.chunk(2)[mesh.get_local_rank("dp")]
    both = DTensor.from_local(
        mine,
        mesh,
        [StridedPlacement(0, split_factor=2), Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    start, size, _, _ = local_box(both)
    copied = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=False)
    summed = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()], run_check=False)
    return (start, size, mine), local_box(copied)[2:], local_box(summed)[3]


def test_chunked_tensor(tmp_path: Path) -> None:
    from threefold.torch_private.distributed import ChunkedTensor

    class Part(ChunkedTensor):
        def chunks(self) -> list[ChunkStorageMetadata]:
            return [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]

        def write_items(self, name: str) -> list[WriteItem]:
            data = TensorWriteData(self.chunks()[0], TensorProperties(dtype=self.dtype), torch.Size([4]))
            return [WriteItem(MetadataIndex(name, torch.Size([0])), WriteItemType.SHARD, tensor_data=data)]

        def chunk_at(self, index: MetadataIndex) -> torch.Tensor:
            return self.storage_of_it

    def part_of(tensor: torch.Tensor) -> Part:
        part = tensor.as_subclass(Part)
        part.storage_of_it = tensor
        return part

    read = torch.zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": part_of(torch.arange(4.0))}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"x": part_of(read)}, checkpoint_id=tmp_path, no_dist=True)
    assert read.tolist() == [0, 1, 2, 3], (
        "torch.distributed.checkpoint no longer asks tensors for __create_write_items__, __create_chunk_list__ and "
        "__get_tensor_shard__"
    )


def _meshes() -> list[str]:
    """What is no longer as it was of the private parts of meshes, on one rank of four."""
    from threefold.torch_private.distributed import (
        StridedPlacement,
        clear_dtensor_cache,
        concatenate_meshes,
        copy_group_timeout,
        default_store,
        flatten_mesh,
        new_group_among,
        process_group_timeout,
        unflatten_mesh,
    )

    wrong = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fine = unflatten_mesh(mesh, "dp", (1, 2), ("copy", "shard"))
    if fine.mesh_dim_names != ("copy", "shard", "tp") or fine["tp"].get_group() is not mesh["tp"].get_group():
        wrong.append("DeviceMesh._unflatten no longer splits an axis and keeps the groups of the others")
    flat = flatten_mesh(fine["shard", "tp"], "all")
    if (flat.ndim, flat.size()) != (1, 4) or dist.get_process_group_ranks(flat.get_group()) != [0, 1, 2, 3]:
        wrong.append("DeviceMesh._flatten no longer makes one axis of several")
    both = concatenate_meshes([mesh["dp"], mesh["tp"]])
    if both.mesh_dim_names != ("dp", "tp") or both.get_group(1) is not mesh.get_group("tp"):
        wrong.append("DeviceMesh._concatenate no longer joins axes of one mesh with their groups")
    shard = StridedPlacement(0, split_factor=2)
    whole = DTensor.from_local(torch.ones(1), both, [shard, Shard(0)], run_check=False, shape=(4,), stride=(1,))
    if isinstance(shard, Shard) or shard.dim != 0 or whole.placements[0] != shard:
        wrong.append("_StridedShard is no longer a placement of its own with the dim that it cuts")
    if process_group_timeout(mesh["tp"].get_group()) <= 0:
        wrong.append("ProcessGroup._get_backend(…).options._timeout is no longer how long collectives wait")
    copy_group_timeout(mesh["tp"].get_group())
    if process_group_timeout(mesh["tp"].get_group()) != process_group_timeout(dist.group.WORLD):
        wrong.append("ProcessGroup._get_backend(…)._set_default_timeout no longer sets how long collectives wait")
    if default_store().compare_set("canary", "", "first").decode() != "first":
        wrong.append("_get_default_store no longer returns the store of the default process group")
    clear_dtensor_cache()
    rank = dist.get_rank()
    some, pair, every = (new_group_among(groups) for groups in ([[3, 1]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]))
    later = dist.new_group([0, 3])
    if (some is None) is (rank in (1, 3)) or pair is None or every is None:
        wrong.append("_new_process_group_helper no longer makes the groups that a rank is in")
    for group, ranks in ((some, [1, 3]), (pair, [rank // 2 * 2, rank // 2 * 2 + 1]), (every, [0, 1, 2, 3])):
        if group is not None:
            summed = torch.tensor([rank])
            dist.all_reduce(summed, group=group)
            if dist.get_process_group_ranks(group) != ranks or summed.item() != sum(ranks):
                wrong.append("_new_process_group_helper no longer makes a group that can be used as one of new_group")
    if rank in (0, 3):
        dist.barrier(later)  # which has the same name on both, whatever groups they had before
    return wrong


def _fsdp() -> list[str]:
    """The same of FSDP: two micro-batches without reduce-scatter, then all that a backward pass ends with."""
    from threefold.torch_private.distributed import AllGather, ReduceScatter, finish_backward, unreduced_gradients

    calls: list[str] = []

    class Allocates:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Allocates, AllGather):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            calls.append("all-gather")
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    class Scatter(Allocates, ReduceScatter):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
            calls.append("reduce-scatter")
            return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    torch.manual_seed(0)
    module = nn.Linear(4, 4, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(Gather())
    module.set_custom_reduce_scatter(Scatter())
    module.set_is_last_backward(False)
    module.set_requires_gradient_sync(False)
    for _ in range(2):
        module(torch.ones(1, 4)).sum().backward()
    wrong = []
    if "all-gather" not in calls or "reduce-scatter" in calls:
        wrong.append("FSDP no longer calls a custom AllGather, or no longer waits with reduce-scatter until it is told")
    if [tuple(each.shape) for each in unreduced_gradients(module)] != [(4, 4)]:
        wrong.append("FSDP keeps a whole gradient that waits to be reduced elsewhere than in its parameters")
    module.set_is_last_backward(True)
    module.set_requires_gradient_sync(True)
    finish_backward(module)
    gradient = module.weight.grad
    if "reduce-scatter" not in calls or gradient is None or not bool((gradient.to_local() == 4).all()):
        wrong.append("_root_post_backward_final_callback no longer reduce-scatters what waits to be reduced")
    return wrong


def _pipeline() -> list[str]:
    """The same of pipeline schedules: one micro-batch through two stages."""
    from threefold.torch_private.pipelining import (
        BufferedPipelineStage,
        PipelineSchedule,
        PipelineScheduleRuntime,
        RecvInfo,
        Schedule1F1BOfAnyCount,
        planned_actions,
    )

    made: list[RecvInfo] = []
    received: list[Any] = []

    class Stage(BufferedPipelineStage):
        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
            return self.receive(self.args_recv_info[fwd_chunk_id], super().get_fwd_recv_ops, fwd_chunk_id)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
            return self.receive(self.grad_recv_info.get(bwd_chunk_id, ()), super().get_bwd_recv_ops, bwd_chunk_id)

        def receive(self, infos: tuple[RecvInfo, ...], receive: Any, chunk: int) -> Any:
            made.extend(info for info in infos if not info.is_root_arg)
            received.extend(info.buffer for info in infos)
            for info in infos:
                info.buffer = None if info.is_root_arg else torch.zeros(1, 4)
            return receive(chunk)

    rank, wrong = dist.get_rank(), []
    torch.manual_seed(0)
    stage = Stage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1BOfAnyCount(stage, 1, loss_fn=lambda output, target: (output - target).sum())
    inputs = (torch.ones(1, 4),) if rank == 0 else ()
    schedule.step(*inputs, target=torch.zeros(1, 4))
    if any(parameter.grad is None for parameter in stage.submod.parameters()):
        wrong.append("Schedule1F1B no longer runs fewer micro-batches than stages past the check of its constructor")
    if len(made) != 1 or any(buffer is not None for buffer in received):
        wrong.append(
            "PipelineStage no longer makes _RecvInfo buffers in _setup_forward_recv_info and _setup_backward_… alone"
        )
    if not stage.is_on_this_rank(rank) or stage.is_on_this_rank(1 - rank):
        wrong.append("PipelineStage._is_same_rank no longer says which stages are on this rank")
    if [str(action) for action in planned_actions(schedule)] != [f"{rank}F0", f"{rank}B0"]:
        wrong.append("schedules no longer have _stage, _n_microbatches and _num_stages, of which their order follows")
    if not isinstance(schedule, PipelineSchedule) or not issubclass(PipelineScheduleRuntime, PipelineSchedule):
        wrong.append("_PipelineSchedule is no longer the base class of all schedules")
    return wrong


def test_add_send_recv() -> None:
    from torch.distributed.pipelining.schedules import B, F

    from threefold.torch_private.pipelining import PipelineAction, add_send_recv

    computed = {rank: [PipelineAction(rank, F, 0), PipelineAction(rank, B, 0)] for rank in range(2)}
    found = {rank: [*map(str, actions)] for rank, actions in add_send_recv(computed, lambda stage: stage, 2).items()}
    assert found == {0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0"], 1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]}, (
        "_Action and _add_send_recv no longer put a send and a receive between the actions of two stages"
    )


@pytest.mark.parametrize(
    ("ranks", "check"), [(4, _meshes), (2, _fsdp), (2, _pipeline)], ids=["meshes", "fsdp", "pipeline"]
)
def test_distributed(pool, ranks: int, check: Callable[[], list[str]]) -> None:
    assert pool.run(ranks, check) == [[]] * ranks


def names_of_threads() -> set[str]:
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads")
def test_gloo_threads_have_their_name(pool) -> None:
    """Else `settle_gloo_at_exit` waits for none of them."""
    from threefold.torch_private.distributed import GLOO_THREAD

    assert GLOO_THREAD in pool.run(2, names_of_threads)[0], "torch names the threads of gloo otherwise"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads")
def test_settling_waits_for_a_thread_that_works() -> None:
    """A stand-in with the name of gloo's threads, which is busy for a while."""
    from threefold.torch_private.distributed import GLOO_THREAD, settle_gloo

    begun, done, content = threading.Event(), threading.Event(), bytes(200 << 20)

    def work() -> None:
        ctypes.CDLL(None).prctl(15, GLOO_THREAD.encode(), 0, 0, 0)  # PR_SET_NAME
        begun.set()
        hashlib.sha256(content).digest()  # without the interpreter's lock
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    settle_gloo()
    assert done.is_set()
    thread.join()
