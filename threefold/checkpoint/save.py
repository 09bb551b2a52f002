"""Atomic saving of a checkpoint, while training waits or in the background, into the same files.

Each rank writes its tensors-*.bin. Then the first rank writes tensors.json (`checkpoint.tensors.Writer`), the text
files and finally the manifest checkpoint.json, and gives the folder its name.
"""

import errno
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from threefold.checkpoint.folder import DIVERGED, complete, path_of, remove, remove_partial
from threefold.checkpoint.manifest import PARTIAL, REPLACED, Facts, write_manifest
from threefold.checkpoint.tensors import ALIGNMENT, Writer, detached, save_tensors
from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.mesh import Mesh
from threefold.errors import ProcessFault, UserError
from threefold.host import WorkThread, exchange_paths
from threefold.output import sync, write_durably
from threefold.torch_private.tensors import foreach_copy_


def save_checkpoint(
    run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str], world: Axis
) -> Path:
    """Write a checkpoint atomically, and return its folder. Collective over the world.

    It has a temporary name until it is complete, so a full disk or a killed process leaves the earlier ones unchanged
    and nothing that looks like a new one. Files of a failed save are deleted. `texts` are further files by name.

    The folder is not staged with `threefold.output`, which serves one process: all ranks, on several hosts, write into
    it under a name derived from the step, and the run's lock keeps other writers out.

    Raises:
        UserError: on every rank, if the checkpoint cannot be written.
        ProcessFault: on every rank, if a rank's process ran out of open files or memory.
    """
    return write_checkpoint(run_dir, facts, texts, world, lambda folder: save_tensors(tensors, folder, world))


def write_checkpoint(
    run_dir: Path, facts: Facts, texts: Mapping[str, str], world: Axis, write: Callable[[Path], None]
) -> Path:
    """Write a checkpoint like `save_checkpoint`; every rank calls `write` to put the tensors into a folder."""
    path = path_of(run_dir, facts.step)
    partial = path.with_name(path.name + PARTIAL)

    def begin() -> None:
        remove_partial(run_dir)
        path.parent.mkdir(exist_ok=True)  # no `parents=True`: if the run's folder was deleted, fail rather than make it
        partial.mkdir()

    def finish() -> None:
        for name, text in texts.items():
            write_durably(partial / name, text)
        write_manifest(partial, facts)
        put_in_place(partial, path)

    try:
        on_first(world, begin)
        write(partial)
        on_first(world, finish)
    except BaseException as error:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        # A process ran out of open files or memory; ranks exchange errors as text.
        limited = any(f"[Errno {limit}]" in str(error) for limit in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
        disk = shutil.disk_usage(next((parent for parent in path.parents if parent.is_dir()), Path(".")))
        raise (ProcessFault if limited else UserError)(
            f"The checkpoint {path} cannot be written ({error}); {disk.free / 1e9:.1f} GB of its disk are free, and "
            "those before it are as they were."
        ) from error
    return path


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete checkpoint durably to its final name, replacing a checkpoint of that name.

    At every moment one of the two is complete under a name that `folders` recognizes. The old one may be the only
    checkpoint: a custom loop may save the same step again and again.
    """
    replaced = path.with_name(path.name + REPLACED)
    if path.exists() and exchange_paths(partial, path):
        replaced = partial  # now the old one
    else:
        if path.exists():
            remove(replaced)
            path.rename(replaced)
        partial.rename(path)
    sync(path.parent)
    remove(replaced)


def set_aside_checkpoint(run_dir: Path, step: int, world: Axis) -> tuple[Path, Path] | None:
    """Rename the checkpoint of a diverged model, so that no run resumes from it. Collective over the world.

    Returns the new folder and that of the next older checkpoint; None, and nothing is renamed, if there is none.
    UserError, on every rank, if it cannot be renamed.
    """
    path = path_of(run_dir, step)
    aside = path.with_name(path.name + DIVERGED)
    older = max((checkpoint.path for checkpoint in complete(run_dir) if checkpoint.step < step), default=None)

    def rename() -> None:
        # Under a name that no run resumes from before anything else, such as deleting an earlier one of this step.
        hidden = path.with_name(path.name + PARTIAL) if aside.exists() else aside
        path.rename(hidden)
        if hidden != aside:
            shutil.rmtree(aside)
            hidden.rename(aside)
        sync(path.parent)

    if older is None:
        return None
    try:
        on_first(world, rename)
    except OSError as error:
        raise UserError(f"{path}, of a model that diverged, cannot be renamed ({error}); remove it.") from error
    return aside, older


def on_first(world: Axis, work: Callable[[], None]) -> None:
    """Run `work` on the first rank while all ranks wait; its OSError or UserError is raised on every rank."""
    failed = None
    if world.is_first:
        try:
            work()
        except (OSError, UserError) as error:
            failed = UserError if isinstance(error, UserError) else OSError, str(error)
    if found := world.gather_objects(failed)[0]:
        kind, reason = found
        raise kind(reason)


@dataclass(frozen=True)
class Written:
    """Outcome of a background save, the same on every rank; `failure` is None if the checkpoint is complete."""

    step: int
    path: Path
    seconds: float
    failure: UserError | None


class BackgroundSaver:
    """Background saver of checkpoints, one at a time, bit for bit equal to those of `save_checkpoint`.

    Each rank copies the parts that it has to write into host memory; training continues while a thread writes them. The
    threads of all ranks communicate over a separate process group. Collective over the world.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._world: Axis | None = None
        self._thread = WorkThread("threefold-saving")
        self._written: Written | None = None
        self._planned: tuple[SavePlan, Metadata] | None = None
        self._planned_for: list[tuple[str, torch.Size, torch.dtype]] = []  # this rank's tensors
        self._memory = torch.empty(0, dtype=torch.uint8)

    def save(self, run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> Path:
        """Copy the tensors, start writing and return the future folder; `wait` must have returned the previous save."""
        if self._world is None:
            self._world = self._mesh.background_axis()
        world, path, held = self._world, path_of(run_dir, facts.step), detached(tensors)
        plan, metadata = self._plan(held)
        copies = self._copied(plan, held)

        def write() -> None:
            failure, begun = None, time.monotonic()
            try:
                write_checkpoint(
                    run_dir, facts, texts, world, lambda folder: _write_parts(plan, metadata, copies, folder, world)
                )
            except UserError as error:
                failure = error
            except Exception as error:  # such as a lost rank, which the training notices by itself
                failure = UserError(f"The checkpoint {path} cannot be written ({type(error).__name__}: {error}).")
            self._written = Written(facts.step, path, time.monotonic() - begun, failure)

        self._thread.do(write)
        return path

    def _plan(self, tensors: dict[str, Tensor]) -> tuple[SavePlan, Metadata]:
        """Return this rank's parts and the metadata, planned anew when a rank's tensors change. Collective."""
        world, now = self._mesh.world, [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if self._planned is None or any(world.gather_objects(now != self._planned_for)):
            planner = _planner_of(tensors, world.is_first)
            # Every rank computes the same global plan, so no part of it has to be sent.
            plans, metadata = planner.create_global_plan(world.gather_objects(planner.create_local_plan()))
            self._planned = Writer(Path(), Heartbeat()).prepare_global_plan(plans)[world.index], metadata
            self._planned_for = now
        return self._planned

    def _copied(self, plan: SavePlan, tensors: dict[str, Tensor]) -> "_CopiedParts":
        """Copy this rank's parts into host memory, which is allocated once and overwritten by the next copy."""
        planner, parts = _planner_of(tensors, False), dict[MetadataIndex, Tensor]()
        for item in plan.items:
            part = planner.resolve_data(item)
            if not isinstance(part, Tensor):
                raise UserError(f"{item.index.fqn} is not a tensor, and a checkpoint holds nothing else.")
            parts[item.index] = part.detach()
        size = sum(part.nbytes + -part.nbytes % ALIGNMENT for part in parts.values())
        if self._memory.nbytes < size:
            pinned = any(part.is_cuda for part in parts.values())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        places, begin = dict[MetadataIndex, Tensor](), 0
        for index, part in parts.items():
            held = self._memory[begin : begin + part.nbytes]
            places[index] = held.view(part.dtype).view(part.shape) if part.numel() else torch.empty_like(part)
            begin += part.nbytes + -part.nbytes % ALIGNMENT
        on_host = [index for index, part in parts.items() if not part.is_cuda]
        with torch.no_grad():
            foreach_copy_([places[index] for index in on_host], [parts[index] for index in on_host])
            for index, part in parts.items():
                if part.is_cuda:
                    places[index].copy_(part, non_blocking=True)
        if len(on_host) < len(parts):
            torch.cuda.synchronize()
        return _CopiedParts(places)

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint has been written, or has failed, and `wait` has not returned it yet."""
        return self._written is not None

    def wait(self) -> Written | None:
        """Wait for the save, whose writes count as this rank's progress, and return its outcome once, if any."""
        if self._world is not None:
            with self._mesh.world.waiting("gather"):  # for any rank's thread
                seen = -1
                while not self._thread.wait(0.5):
                    if (done := self._world.heartbeat.progressed) != seen:
                        seen = done
                        self._mesh.heartbeat.progress()
        written, self._written = self._written, None
        return written

    def then(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, on this rank after the current write."""
        self._thread.do(work)

    def end(self, seconds: float | None = None) -> bool:
        """End the thread after its queued work; wait for at most `seconds` and return whether the work is done."""
        done = self._thread.wait(seconds)
        self._thread.end()
        return done


class _CopiedParts(DefaultSavePlanner):
    """Save planner whose parts are copies in host memory."""

    def __init__(self, tensors: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


def _planner_of(tensors: dict[str, Tensor], is_first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(cast(dict[str, Any], tensors), None, is_first)
    return planner


def _write_parts(plan: SavePlan, metadata: Metadata, copies: _CopiedParts, folder: Path, world: Axis) -> None:
    """Write each rank's parts of the tensors, durably; OSError on every rank if one cannot. Collective over `world`."""
    writer = Writer(folder, world.heartbeat)
    written: list[WriteResult] | str
    try:
        written = writer.write_data(plan, copies).wait()
    except Exception as error:  # the other ranks wait for this one's result, whatever happened
        written = " ".join(str(error).split())[:300] or type(error).__name__
    results = world.gather_objects(written)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise OSError(f"rank {rank}: {result}")
    on_first(world, lambda: writer.finish(metadata, cast(list[list[WriteResult]], results)))
