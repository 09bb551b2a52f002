"""Which parts of a run's tensors each rank writes, and host memory that holds a copy of this rank's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from threefold.checkpoint.format.storage import Writer
from threefold.checkpoint.save import on_first
from threefold.checkpoint.tensors import detached
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.mesh import Axis
from threefold.errors import UserError
from threefold.torch_private.tensors import foreach_copy_

_ALIGNMENT: Final = 64
"""Bytes that each tensor in the host memory begins at a multiple of."""


@dataclass(frozen=True)
class WriteShare:
    """What this rank writes of a checkpoint.

    Attributes:
        plan: its parts.
        metadata: of the whole checkpoint.
    """

    plan: SavePlan
    metadata: dcp.Metadata


class Sharing:
    """Decides as `save_tensors` does which rank writes which part; once, and again where a rank's tensors have changed.

    Args:
        world: all ranks.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._share: WriteShare | None = None
        self._of: list[tuple[str, torch.Size, torch.dtype]] = []

    def share(self, tensors: Mapping[str, Tensor]) -> WriteShare:
        """This rank's share. Collective over the world.

        Args:
            tensors: as `save_tensors` takes them.
        """
        now = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if self._share is None or any(self._world.gather_objects(now != self._of)):
            self._share, self._of = self._decided(tensors), now
        return self._share

    def _decided(self, tensors: Mapping[str, Tensor]) -> WriteShare:
        planner = _planner_of(detached(tensors), self._world.is_first)
        # Each rank computes the same whole plan, which spares sending every rank its part of it.
        plans, metadata = planner.create_global_plan(self._world.gather_objects(planner.create_local_plan()))
        mine = Writer(Path(), Heartbeat()).prepare_global_plan(plans)[self._world.index]
        return WriteShare(mine, metadata)


class HostCopy:
    """A copy of a rank's share in host memory, which is allocated once and used for one checkpoint after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, share: WriteShare, tensors: Mapping[str, Tensor]) -> "Copies":
        """Copy a share of tensors; what was copied before is overwritten.

        Args:
            share: of them.
            tensors: as `save_tensors` takes them.
        """
        planner = _planner_of(detached(tensors), False)
        found = [(item, _resolved(planner, item)) for item in share.plan.items]
        places = self._places([source for _, source in found])
        with torch.no_grad():
            on_host = [(place, source) for place, (_, source) in zip(places, found, strict=True) if not source.is_cuda]
            foreach_copy_([place for place, _ in on_host], [source for _, source in on_host])
            for place, (_, source) in zip(places, found, strict=True):
                if source.is_cuda:
                    place.copy_(source, non_blocking=True)
        if len(on_host) < len(found):
            torch.cuda.synchronize()
        return Copies({item.index: place for (item, _), place in zip(found, places, strict=True)})

    def _places(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """A part of the memory for each tensor."""
        sizes = [math.ceil(source.nbytes / _ALIGNMENT) * _ALIGNMENT for source in sources]
        if self._memory.nbytes < sum(sizes):
            pinned = any(source.is_cuda for source in sources)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        places, begin = [], 0
        for source, size in zip(sources, sizes, strict=True):
            held = self._memory[begin : begin + source.nbytes]
            places.append(held.view(source.dtype).view(source.shape) if source.numel() else torch.empty_like(source))
            begin += size
        return places


class Copies(DefaultSavePlanner):
    """The planner that finds the parts of a share in host memory.

    Args:
        tensors: by the index of their part.
    """

    def __init__(self, tensors: Mapping[dcp.MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


def write_share(share: WriteShare, copies: Copies, folder: Path, world: Axis) -> None:
    """Write the tensors of a checkpoint, each rank its share, durably. Collective over `world`.

    Args:
        share: this rank's.
        copies: of its tensors.
        folder: an empty folder shared by all ranks.
        world: all ranks; of a process group that nothing else uses meanwhile.

    Raises:
        OSError: on every rank, when a rank cannot write.
    """
    writer = Writer(folder, world.heartbeat)
    written: list[WriteResult] | str
    try:
        written = writer.write_data(share.plan, copies).wait()
    except Exception as error:  # the other ranks wait for this one's word, whatever happened
        written = " ".join(str(error).split())[:300] or type(error).__name__
    results = world.gather_objects(written)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise OSError(f"rank {rank}: {result}")
    on_first(world, lambda: writer.finish(share.metadata, cast(list[list[WriteResult]], results)))


def _planner_of(tensors: dict[str, Tensor], is_first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(cast(dict[str, Any], tensors), None, is_first)
    return planner


def _resolved(planner: DefaultSavePlanner, item: WriteItem) -> Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, Tensor):
        raise UserError(f"{item.index.fqn} is no tensor, and a checkpoint holds nothing else.")
    return found.detach()
