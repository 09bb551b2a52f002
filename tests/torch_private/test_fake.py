"""A canary for each private part of torch that dry runs lean on."""

import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from threefold.torch_private.fake import (
    COLLECTIVES,
    FakeTensor,
    OperationMode,
    fake_process_group,
    fake_tensors,
    storage_resizes,
    tree_leaves,
    with_memory,
)


def test_fake_tensors() -> None:
    ones = torch.ones(3)
    with fake_tensors():
        large = torch.empty(1 << 20, 1 << 20)
        assert isinstance(large + 1, FakeTensor)
        assert isinstance(ones + 1, FakeTensor), "fake tensors and others no longer meet in an operation"
        assert large.untyped_storage().nbytes() == 1 << 42, "the storage of a fake tensor no longer tells its bytes"
        with with_memory():
            assert (ones + 1).sum().item() == 6, "operations within unset_fake_temporarily are no longer computed"


def test_fake_process_group() -> None:
    hook = sys.excepthook
    with fake_process_group(5, 4096):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 4096)
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.send(value, 7)
        assert value.tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="has another"), fake_process_group(0, 1):
            pass
    assert not dist.is_initialized()
    assert sys.excepthook is hook, "the hook for tracebacks of ranks stays behind"


def test_operation_mode() -> None:
    seen: list[str] = []

    class Seeing(OperationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seeing():
        torch.ones(2) + 1
    assert seen == ["ones", "add"]


def test_collectives_as_modes_see_them() -> None:
    seen: set[str] = set()

    class Seeing(OperationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            seen.add(func.namespace)
            return func(*args, **(kwargs or {}))

    with fake_process_group(0, 2), Seeing():
        dist.all_reduce(torch.ones(2))
    assert seen & set(COLLECTIVES) == {"c10d"}, "collectives are no longer operations of c10d"


def test_tree_leaves() -> None:
    assert tree_leaves(([1, {"a": 2}], (3,))) == [1, 2, 3]


def test_storage_resizes() -> None:
    seen: list[int] = []
    tensor = torch.ones(4)
    with storage_resizes(lambda storage: seen.append(storage.nbytes())):
        tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(16)
    assert seen == [0], "a storage is no longer resized by UntypedStorage.resize_"


def test_storages_tell_when_they_are_freed() -> None:
    """Which no private name is needed for, but which dry runs lean on."""
    with fake_tensors():
        tensor = torch.empty(3)
        kept, freed = tensor[1:], []
        reference = weakref.ref(tensor.untyped_storage(), freed.append)
        del tensor
        assert not freed
        del kept
        assert freed == [reference]
