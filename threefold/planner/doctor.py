"""Examination of this machine: its parts, disk and rates, its problems in words, and its hardware entry."""

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from threefold.errors import UserError
from threefold.files import format_bytes, shown
from threefold.host import cpu_quota, memory, usable_cores
from threefold.models.block import describe_model
from threefold.planner import measuring
from threefold.planner.block_shape import block_shapes
from threefold.planner.cost import block_seconds, cost_block
from threefold.planner.hardware import THIS_MACHINE, Achievable, Hardware, cpu_name
from threefold.planner.systems import SYSTEMS

RunRanks = Callable[[Callable[..., object], tuple[Any, ...], int, str], object]
"""Function that runs a worker on some local ranks of a device and returns the first rank's result."""


@dataclass(frozen=True)
class MachineFinding:
    """Problem of a machine (an error if training cannot work, a warning if it is slower or may fail) and its remedy."""

    severity: str
    text: str
    remedy: str


@dataclass(frozen=True)
class Machine:
    """Description of this machine; memory in usable bytes, shared memory in free bytes of /dev/shm."""

    host: str
    address: str  # to which the host's name resolves
    system: str
    processor: str
    cores: int  # that this process may use
    machine_cores: int
    quota: float  # cores' worth of time that the control group allows; 0 for no limit
    memory: int
    shared_memory: int
    load: float  # mean number of runnable processes in the last minute
    compiler: str
    gpus: int
    versions: dict[str, str]
    backends: tuple[str, ...]


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of a folder's disk in bytes per second until written data is on it, and its free bytes."""

    folder: str
    bandwidth: float
    free: int


@dataclass(frozen=True)
class Examination:
    """Description of a machine with its rates (of one rank, then of several), disk and problems, the worst first."""

    machine: Machine
    device: str
    rates: tuple[measuring.RankRates, ...]
    disk: DiskSpeed | None
    findings: tuple[MachineFinding, ...]


def examine(
    run_ranks: RunRanks, folder: Path, quick: bool = False, tell: Callable[[str, int, int], None] = lambda *_: None
) -> Examination:
    """Examine this machine, which takes half a minute, or some seconds with `quick`, which measures two ranks at most.

    `tell` is called before each part with its name, its index from 0 and the number of parts.
    """
    machine = this_machine()
    device = "cuda" if machine.gpus and "nccl" in machine.backends else "cpu"
    counts = [count for count in (1, 2, 4, 8) if count <= (machine.gpus if device == "cuda" else 2 if quick else 8)]
    parts = [f"{count} {'rank' if count == 1 else 'ranks'}" for count in counts] + ["disk"]
    rates, problems, disk = list[measuring.RankRates](), list[MachineFinding](), None
    for number, count in enumerate(counts):
        tell(parts[number], number, len(parts))
        effort = measuring.QUICK if quick else measuring.ON_GPUS if device == "cuda" else measuring.MeasuringEffort()
        if count not in (1, counts[-1]) and device == "cpu":
            effort = measuring.MeasuringEffort(sizes=(256,), seconds=0.2)
        try:
            measured = run_ranks(measuring.measure_ranks, (("fp32", "bf16"), effort, device), count, device)
            assert isinstance(measured, measuring.RankRates)
            rates.append(measured)
        except (UserError, RuntimeError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            remedy = "see what the sentence says; nothing can be trained with so many ranks before"
            problems.append(MachineFinding("error", f"{parts[number]} cannot be run here: {reason}", remedy))
    tell("disk", len(counts), len(parts))
    try:
        disk = measure_disk(folder, 16 << 20 if quick else 128 << 20)
    except UserError as error:
        remedy = "give a folder that can be written, with --folder"
        problems.append(MachineFinding("warning", str(error).rstrip("."), remedy))
    return Examination(machine, device, tuple(rates), disk, (*problems, *findings_of(machine, device, rates, disk)))


def findings_of(
    machine: Machine, device: str, rates: Sequence[measuring.RankRates], disk: DiskSpeed | None
) -> list[MachineFinding]:
    """Return the findings about a machine, the worst first."""
    found = [MachineFinding(*each) for each in _findings(machine, device, rates, disk)]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _findings(
    machine: Machine, device: str, rates: Sequence[measuring.RankRates], disk: DiskSpeed | None
) -> Iterator[tuple[str, str, str]]:
    cores, get = machine.cores, "from https://pytorch.org"
    if "gloo" not in machine.backends:
        yield "error", "this build of torch has no gloo", f"install torch {get}"
    if machine.gpus and device == "cpu":
        yield "error", f"torch can use none of the {machine.gpus} GPUs", f"install a build for their driver {get}"
    if 0 < machine.quota <= cores and machine.quota < machine.machine_cores:
        text = f"the control group allows {machine.quota:g} cores' worth of time, on {machine.machine_cores} cores"
        yield "warning", text, "raise the container's limit of CPU time (docker --cpus)"
    if machine.load > cores / 2:
        text = f"other programs keep {machine.load:.1f} processes busy on {cores} cores"
        yield "warning", text, "measure again when the machine is quiet, as all rates here are too low"
    if machine.shared_memory < 256 << 20:
        text = (
            f"/dev/shm has {format_bytes(machine.shared_memory)} to write, too little for the collectives of many ranks"
        )
        yield "warning", text, "make it larger and writable (docker --shm-size 2g); without, ranks talk over sockets"
    if rates and device == "cpu":
        alone = {dtype: max(sizes.values(), default=0.0) for dtype, sizes in rates[0].matrix.items()}
        if alone.get("bf16", 0.0) < alone.get("fp32", 0.0):
            text = f"bf16 products reach {alone.get('bf16', 0.0) / alone['fp32']:.0%} of the rate of fp32 here"
            yield "warning", text, "train with precision.dtype fp32"
        if rates[-1].ranks > cores:
            text = f"{rates[-1].ranks} ranks share {cores} cores, each computing at a part of their rate"
            yield "note", text, f"train with at most {cores} ranks where speed counts"
    if disk is not None and disk.bandwidth < 100e6:
        text = f"the disk of {disk.folder} takes {format_bytes(int(disk.bandwidth))}/s, so checkpoints take long"
        yield "warning", text, "write runs to a faster disk, or set checkpoint.async_save: true"
    if not machine.compiler:
        text = "there is no C compiler, which train.compile needs"
        yield "note", text, "install one (apt install g++) if you want compiled layers"
    if machine.address.startswith("127."):
        text = f"the name {machine.host} resolves to {machine.address}, which no other host can reach"
        yield "note", text, "for runs on several hosts, set GLOO_SOCKET_IFNAME to an interface"


def measured_entry(found: Examination) -> Hardware | None:
    """Build the entry `this-machine`; None if no ranks could be measured.

    Its rates are those of each rank in the largest measurement while all ranks computed, so no further fraction
    applies; only the depth at which a product reaches half of its rate is fitted.
    """
    several = [rates for rates in found.rates if any(rates.matrix.values())]
    if not several:
        return None
    most, machine, is_gpu = several[-1], found.machine, found.device == "cuda"
    fp32 = most.matrix.get("fp32") or next(sizes for sizes in most.matrix.values() if sizes)
    depth = measuring.half_depth(fp32, 128 if max(fp32) >= 128 else 0)
    peaks = {dtype: max(sizes.values()) * (1 + depth / max(fp32)) for dtype, sizes in most.matrix.items() if sizes}
    title, bytes_of_rank = machine.processor, max(1, machine.memory // most.ranks)
    if is_gpu:
        import torch

        properties = torch.cuda.get_device_properties(0)
        title, bytes_of_rank = properties.name, int(properties.total_memory)
    link = measuring.measured_link(most)
    whole = dict.fromkeys(("matrix", "memory", "link", "network"), 1.0)
    shares = whole | measuring.attention_shares(most, peaks)
    measured = f"{most.ranks} local ranks of {most.threads} threads at the same time"
    entry = Hardware(
        name=THIS_MACHINE,
        title=title,
        device=found.device,
        matrix_rates=peaks,
        memory_bytes=bytes_of_rank,
        memory_bandwidth=most.memory_bandwidth,
        gpus_per_node=most.ranks,
        inside=link,
        between=link,
        achievable=Achievable(**shares, matrix_depth=depth, kernel=most.kernel, step=0.0, block=most.block),
        cores=0 if is_gpu else machine.cores,
        sources=(f"threefold doctor on {machine.host}: {measured}",),
    )
    if is_gpu or not most.block:  # a GPU's kernels run beside the host's work
        return entry
    config, system = measuring.tiny_config(), SYSTEMS["own-cpu"]
    block = block_shapes(describe_model(config.model, config.data.sequence_length))[0]
    without = replace(entry, achievable=replace(entry.achievable, block=0.0))
    kernels = block_seconds(cost_block(config, block, 1, system), without, system).total
    kinds = "sharded_block", "tensor_block", "context_block"
    longer = {kind: max(0.0, getattr(most, kind) - most.block) for kind in kinds}
    return replace(entry, achievable=replace(entry.achievable, block=max(0.0, most.block - kernels), **longer))


def this_machine() -> Machine:
    """Describe this machine without measuring. Imports torch, but does not initialise CUDA."""
    import torch
    import torch.distributed as dist

    versions, address, shared, quota = {"python": platform.python_version()}, "", 0, cpu_quota()
    for name in ("torch", "numpy", "tokenizers", "safetensors", "pydantic", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if os.access("/dev/shm", os.W_OK):  # not where it is mounted read-only
        shared = shutil.disk_usage("/dev/shm").free
    chosen = (os.environ.get("CXX") or os.environ.get("CC") or "").split()
    compilers = map(shutil.which, (*chosen[:1], "g++", "clang++", "c++", "gcc", "cc"))
    return Machine(
        host=socket.gethostname(),
        address=address,
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        processor=cpu_name(),
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        quota=quota if isfinite(quota) else 0.0,
        memory=memory(),
        shared_memory=shared,
        load=os.getloadavg()[0],
        compiler=next(filter(None, compilers), ""),
        gpus=torch.cuda.device_count(),
        versions=versions,
        backends=tuple(name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()),
    )


def measure_disk(folder: Path, nbytes: int) -> DiskSpeed:
    """Time writing `nbytes` into a temporary file of `folder` until they are on the disk; UserError if that fails."""
    block = os.urandom(4 << 20)  # random, so that no disk compresses it
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".threefold-doctor-") as file:
            started = time.perf_counter()
            for _ in range(nbytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
        return DiskSpeed(str(folder.resolve()), nbytes / seconds, shutil.disk_usage(folder).free)
    except OSError as error:
        raise UserError(f"The folder {shown(str(folder))} cannot be written: {error.strerror}.") from None
