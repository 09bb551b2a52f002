"""Examination of this machine: its parts, rates of ranks and disk, its problems in words, and its hardware entry."""

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from itertools import count
from math import isfinite, log2
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.files import counted, format_bytes, shown
from threefold.host import cpu_quota, keep_freed_memory, memory, usable_cores
from threefold.models.family import make_model, model_plan
from threefold.ops.kernels import linear
from threefold.planner.block import block_shapes, describe_model
from threefold.planner.hardware import THIS_MACHINE, Achievable, Hardware, Link, cpu_name
from threefold.planner.layer_cost import block_seconds, cost_block
from threefold.planner.model_size import ZERO_WEIGHTS
from threefold.planner.systems import SYSTEMS
from threefold.train.step import Engine

NCCL: Final = "NCCL"
_Timed = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class MachineFinding:
    """Problem of a machine (an error if training cannot work, a warning if it is slower or may fail) and its remedy."""

    severity: str
    text: str
    remedy: str


def _address() -> str:
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _compiler() -> str:
    chosen = (os.environ.get("CXX") or os.environ.get("CC") or "").split()
    return next(filter(None, map(shutil.which, (*chosen[:1], "g++", "clang++", "c++", "gcc", "cc"))), "")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "tokenizers", "safetensors", "pydantic", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(frozen=True)
class Machine:
    """Description of this machine, without measuring or initialising CUDA; memory in bytes."""

    host: str = field(default_factory=socket.gethostname)
    address: str = field(default_factory=_address)  # to which the host's name resolves
    system: str = f"{platform.system()} {platform.release()} ({platform.machine()})"
    processor: str = field(default_factory=cpu_name)
    cores: int = field(default_factory=usable_cores)  # that this process may use
    machine_cores: int = os.cpu_count() or 1
    quota: float = field(default_factory=lambda: q if isfinite(q := cpu_quota()) else 0.0)  # cores' worth of time, or 0
    memory: int = field(default_factory=memory)
    shared_memory: int = field(  # free, if it is not mounted read-only
        default_factory=lambda: shutil.disk_usage("/dev/shm").free if os.access("/dev/shm", os.W_OK) else 0
    )
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # mean number of runnable processes in a minute
    compiler: str = field(default_factory=_compiler)
    gpus: int = field(default_factory=torch.cuda.device_count)
    versions: dict[str, str] = field(default_factory=_versions)
    backends: tuple[str, ...] = tuple(n for n in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{n}_available")())


class MeasuringEffort(NamedTuple):
    """Extent of the measurements."""

    seconds: float = 0.35  # of each measurement
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)  # of square matrices
    nbytes: int = 4 << 20  # of a large message
    attention: tuple[tuple[int, int], ...] = ((128, 32), (128, 128), (1024, 128))  # positions, head dim
    copied: int = 64 << 20  # bytes, more than caches hold


QUICK: Final = MeasuringEffort(0.03, (64, 256), 1 << 20, ((64, 32), (64, 64), (256, 64)), 8 << 20)
ON_GPUS: Final = MeasuringEffort(
    0.35, (512, 1024, 2048, 4096, 8192), 256 << 20, ((2048, 64), (2048, 128), (8192, 128)), 1 << 30
)


@dataclass(frozen=True)
class Collective:
    """Measured collective: seconds of a small message, and bytes per second of a large one."""

    latency: float
    bandwidth: float
    transport: str


@dataclass(frozen=True)
class RankRates:
    """Rates of one of several ranks while all do the same, averaged over them."""

    ranks: int
    threads: int
    matrix: dict[str, dict[int, float]]  # FLOP/s by dtype and size of square matrices
    attention: dict[str, list[dict[str, float]]]  # by dtype, as of `_attention`
    memory_bandwidth: float  # of the bytes that a copy reads and writes
    kernel: float  # seconds of a kernel on a few elements with autograd's work for it
    block: float = 0.0  # seconds of a minimal block's forward and backward pass
    sharded_block: float = 0.0  # the same with its weights sharded over the ranks
    tensor_block: float = 0.0  # with tensor parallelism, the mean of pairs and of all ranks
    context_block: float = 0.0  # in pairs of context-parallel ranks
    collectives: dict[str, Collective] = field(default_factory=dict)  # `all_reduce` of all ranks, and of `pairs`


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
    rates: tuple[RankRates, ...]
    disk: DiskSpeed | None
    findings: tuple[MachineFinding, ...]


def examine(
    spawn: Callable[..., Any],
    folder: Path,
    quick: bool = False,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> Examination:
    """Examine this machine, which takes half a minute, or some seconds with `quick`, which measures two ranks at most.

    `spawn(worker, arguments, ranks, device=device)` runs a worker on local ranks and returns the first one's result.
    `tell` is called before each part with its name, its index from 0 and the number of parts.
    """
    machine, rates, problems, disk = Machine(), list[RankRates](), list[MachineFinding](), None
    device = "cuda" if machine.gpus and "nccl" in machine.backends else "cpu"
    counts = [each for each in (1, 2, 4, 8) if each <= (machine.gpus if device == "cuda" else 2 if quick else 8)]
    for number, ranks in enumerate(counts):
        tell(part := counted(ranks, "rank"), number, len(counts) + 1)
        effort = QUICK if quick else ON_GPUS if device == "cuda" else MeasuringEffort()
        if ranks not in (1, counts[-1]) and device == "cpu":
            effort = MeasuringEffort(sizes=(256,), seconds=0.2)
        try:
            rates.append(spawn(measure_ranks, (("fp32", "bf16"), effort, device), ranks, device=device))
        except (UserError, RuntimeError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            remedy = "see what the sentence says; nothing can be trained with so many ranks before"
            problems.append(MachineFinding("error", f"{part} cannot be run here: {reason}", remedy))
    tell("disk", len(counts), len(counts) + 1)
    try:
        disk = measure_disk(folder, 16 << 20 if quick else 128 << 20)
    except UserError as error:
        remedy = "give a folder that can be written, with --folder"
        problems.append(MachineFinding("warning", str(error).rstrip("."), remedy))
    return Examination(machine, device, tuple(rates), disk, (*problems, *findings_of(machine, device, rates, disk)))


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


def findings_of(
    machine: Machine, device: str, rates: Sequence[RankRates], disk: DiskSpeed | None
) -> Iterator[MachineFinding]:
    """Yield the findings about a machine, the worst first."""
    error, warning, note = (partial(MachineFinding, severity) for severity in ("error", "warning", "note"))
    cores, get, on_cpu = machine.cores, "from https://pytorch.org", rates if device == "cpu" else ()
    if "gloo" not in machine.backends:
        yield error("this build of torch has no gloo", f"install torch {get}")
    if machine.gpus and device == "cpu":
        yield error(f"torch can use none of the {machine.gpus} GPUs", f"install a build for their driver {get}")
    if 0 < machine.quota <= cores and machine.quota < machine.machine_cores:
        text = f"the control group allows {machine.quota:g} cores' worth of time, on {machine.machine_cores} cores"
        yield warning(text, "raise the container's limit of CPU time (docker --cpus)")
    if machine.load > cores / 2:
        text = f"other programs keep {machine.load:.1f} processes busy on {cores} cores"
        yield warning(text, "measure again when the machine is quiet, as all rates here are too low")
    if machine.shared_memory < 256 << 20:
        free = format_bytes(machine.shared_memory)
        text = f"/dev/shm has {free} to write, too little for the collectives of many ranks"
        yield warning(text, "make it larger and writable (docker --shm-size 2g); without, ranks talk over sockets")
    for one in on_cpu[:1]:
        fp32, bf16 = (max(one.matrix.get(dtype, {}).values(), default=0.0) for dtype in ("fp32", "bf16"))
        if bf16 < fp32:
            text = f"bf16 products reach {bf16 / fp32:.0%} of the rate of fp32 here"
            yield warning(text, "train with precision.dtype fp32")
    if disk is not None and disk.bandwidth < 100e6:
        text = f"the disk of {disk.folder} takes {format_bytes(int(disk.bandwidth))}/s, so checkpoints take long"
        yield warning(text, "write runs to a faster disk, or set checkpoint.async_save: true")
    if on_cpu and (ranks := on_cpu[-1].ranks) > cores:
        text = f"{ranks} ranks share {cores} cores, each computing at a part of their rate"
        yield note(text, f"train with at most {cores} ranks where speed counts")
    if not machine.compiler:
        text = "there is no C compiler, which train.compile needs"
        yield note(text, "install one (apt install g++) if you want compiled layers")
    if machine.address.startswith("127."):
        text = f"the name {machine.host} resolves to {machine.address}, which no other host can reach"
        yield note(text, "for runs on several hosts, set GLOO_SOCKET_IFNAME to an interface")


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
    depth = half_depth(fp32, 128 if max(fp32) >= 128 else 0)
    peaks = {dtype: max(sizes.values()) * (1 + depth / max(fp32)) for dtype, sizes in most.matrix.items() if sizes}
    title, bytes_of_rank, link = machine.processor, max(1, machine.memory // most.ranks), measured_link(most)
    if is_gpu:
        properties = torch.cuda.get_device_properties(0)
        title, bytes_of_rank = properties.name, int(properties.total_memory)
    reached = {"matrix": 1.0, "memory": 1.0, "link": 1.0, "network": 1.0, **attention_fractions(most, peaks)}
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
        achievable=Achievable(**reached, matrix_depth=depth, kernel=most.kernel, step=0.0),
        cores=0 if is_gpu else machine.cores,
        sources=(f"threefold doctor on {machine.host}: {measured}",),
    )
    host, config = {"block": most.block}, tiny_config()
    if not is_gpu and most.block:  # a GPU's kernels run beside the host's work
        block = block_shapes(describe_model(config.model, config.data.sequence_length))[0]
        system = SYSTEMS["own-cpu"]
        kernels = block_seconds(cost_block(config, block, 1, system), entry, system).total
        kinds = "sharded_block", "tensor_block", "context_block"
        host = {kind: max(0.0, getattr(most, kind) - most.block) for kind in kinds}
        host["block"] = max(0.0, most.block - kernels)
    return replace(entry, achievable=replace(entry.achievable, **host))


def measure_ranks(info: Any, dtypes: Sequence[str], effort: MeasuringEffort, device: str = "cpu") -> RankRates:
    """Measure this rank while the others do the same. Collective over the world."""
    if device == "cpu":
        keep_freed_memory()  # as in a training rank
    world = dist.get_world_size()
    on = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    mesh = Mesh(Layout(dp=world // 2, tp=2) if world > 1 else Layout(), on)
    timed = partial(_seconds, mesh, effort.seconds)
    block = partial(measure_block, timed, world, on)
    source = torch.zeros(effort.copied // 4, device=on)
    target, tiny = torch.empty_like(source), torch.ones(64, device=on, requires_grad=True)

    def chain() -> None:
        out = tiny
        for _ in range(16):
            out = out + tiny
        torch.autograd.grad(out.sum(), tiny)

    several, copied = world > 1, 2 * effort.copied / timed(lambda: target.copy_(source))
    return RankRates(
        ranks=world,
        threads=torch.get_num_threads(),
        matrix={dtype: _products(timed, DTYPES[dtype], effort.sizes, on) for dtype in dtypes},
        attention={name: [_attention(timed, DTYPES[name], on, *each) for each in effort.attention] for name in dtypes},
        memory_bandwidth=copied,
        kernel=timed(chain) / 32,
        block=block(),
        sharded_block=block(zero=ZERO_WEIGHTS) if several else 0.0,
        tensor_block=mean(block(tp=tp) for tp in (2, world)) if several else 0.0,
        context_block=block(cp=2) if several else 0.0,
        collectives=_all_reduces(timed, mesh, effort.nbytes, copied / 2) if several else {},
    )


def _seconds(mesh: Mesh, budget: float, operation: Callable[[], object]) -> float:
    """Return the seconds of one call among many, equally many on every rank, averaged over the ranks."""

    def mean_of(repeats: int) -> float:
        mesh.world.barrier()
        started = time.perf_counter()
        for _ in range(repeats):
            operation()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=mesh.device)
        return float(mesh.world.all_reduce_values(seconds)[0]) / mesh.world.size / repeats

    mean_of(1)
    repeats = max(2, int(budget / max(mean_of(1), 1e-7) / 2))
    return min(mean_of(repeats) for _ in range(2))  # in case another program disturbs one


_LAYERS, _VOCAB, _LENGTH = 4, 32, 16
_FEW, _MANY = 1, 4  # micro-batches of two steps, whose difference cancels the fixed cost of a step


@cache
def tiny_config(micro_batches: int = _FEW, device: str = "cpu", **parallel: int) -> Config:
    """Return a resolved config of a minimal GPT with `micro_batches` per data-parallel rank of a layout."""
    batch = parallel.get("dp", 1) * micro_batches
    given: dict[str, Any] = {
        "model": {"num_layers": _LAYERS, "hidden_size": 32, "num_attention_heads": 8, "vocab_size": _VOCAB},
        "data": {"path": "none", "sequence_length": _LENGTH},
        "parallel": parallel,
        "train": {"global_batch_size": batch, "micro_batch_size": 1, "device": device},
    }
    return resolve(Config.model_validate(given), _VOCAB)


def measure_block(timed: _Timed, ranks: int, device: torch.device, tp: int = 1, cp: int = 1, zero: int = 0) -> float:
    """Return the seconds of one tiny block's forward and backward pass of a micro-batch. Collective over the world.

    Its kernels take almost no time, so that Python and autograd remain; tp · cp divides `ranks`.
    """
    dp = ranks // (tp * cp)
    mesh, times = Mesh(Layout(dp=dp, tp=tp, cp=cp), device), []
    for micro_batches in (_FEW, _MANY):
        config = tiny_config(micro_batches, device.type, dp=dp, tp=tp, cp=cp, zero=zero)
        engine = Engine(partial(make_model, config.model), model_plan(config.model, _LENGTH), mesh, config)
        rows = torch.arange(config.train.global_batch_size).chunk(dp)[mesh.dp.index]
        tokens = torch.zeros(len(rows), _LENGTH, dtype=torch.int64)  # the engine takes them to the device
        step = map(partial(engine.train_step, Batch(tokens, tokens, rows)), count())
        times.append(timed(partial(next, step)))
    return max(0.0, times[1] - times[0]) / ((_MANY - _FEW) * _LAYERS)


def _products(timed: _Timed, dtype: torch.dtype, sizes: Sequence[int], device: torch.device) -> dict[int, float]:
    """Return the FLOP/s of the models' linear layers by size, without sizes that would take half a second."""
    found: dict[int, float] = {}
    before, seconds = sizes[0], 0.0
    for size in sizes:
        if seconds * (size / before) ** 3 > 0.5:
            break
        x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        with torch.no_grad():
            before, seconds = size, timed(partial(linear, x, weight))
        found[size] = 2 * size**3 / seconds
    return found


def _attention(timed: _Timed, dtype: torch.dtype, on: torch.device, positions: int, head_dim: int) -> dict[str, float]:
    """Return the FLOP/s of both passes of fused causal attention, without the masked part."""
    shape = (2, 256 // head_dim, positions, head_dim)
    query, key, value, grad = (torch.randn(shape, device=on).to(dtype).requires_grad_() for _ in range(4))
    flops = 2 * 2 * 2 * 256 * positions**2 / 2  # two products, half of them masked
    forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    seconds = timed(forward)
    both = timed(lambda: torch.autograd.grad(forward(), (query, key, value), grad.detach()))
    rates = {"forward": flops / seconds, "backward": 2.5 * flops / max(both - seconds, seconds)}
    return {"positions": positions, "head_dim": head_dim, **rates}


def _all_reduces(timed: _Timed, mesh: Mesh, nbytes: int, fastest: float) -> dict[str, Collective]:
    """Measure an all-reduce of all ranks, and of simultaneous pairs; `fastest` is the bandwidth of a copy in memory.

    Each follows a product, as in training: ranks that share cores arrive one after another, and a waiting rank yields
    its core. The time that it adds to the product is its cost.
    """
    x, found = torch.randn(512, 512, device=mesh.device), {}
    with torch.no_grad():
        alone = timed(partial(linear, x, x))
        for name, axis in (("all_reduce", mesh.world), ("pairs", mesh.tp)):
            tensors = (torch.zeros(size // 4, device=mesh.device) for size in (256, nbytes))
            small, large = (timed(lambda: (linear(x, x), axis.all_reduce_(tensor))) for tensor in tensors)  # noqa: B023
            transport = "shared memory" if axis.shares_memory else NCCL if mesh.device.type == "cuda" else "gloo"
            found[name] = fitted_collective(alone, small, large, nbytes, fastest, transport)
    return found


def fitted_collective(
    alone: float, small: float, large: float, nbytes: int, fastest: float, transport: str
) -> Collective:
    """Fit a collective to the seconds of a product alone, and of one before a message of no size and of `nbytes`.

    On a busy machine the large message may seem as fast as the small one; it cannot be above the `fastest` bandwidth.
    """
    latency = max(small - alone, 1e-7)
    return Collective(latency, nbytes / max(large - alone - latency, nbytes / fastest), transport)


def attention_fractions(rates: RankRates, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of attention, in the first dtype that has rates, and the sizes that reach half of them."""
    names = "attention", "attention_backward", "attention_length", "attention_depth"
    dtype = next((dtype for dtype in peaks if rates.attention.get(dtype)), None)
    if dtype is None:
        return dict(zip(names, (0.5, 0.5, 0.0, 0.0), strict=True))
    measured = rates.attention[dtype]
    # FLOP/s of both passes; the backward pass has 2.5 times the operations of the forward pass.
    narrow, wide, long = (3.5 / (1 / each["forward"] + 2.5 / each["backward"]) for each in measured)
    heads, positions = ([int(each[key]) for each in measured] for key in ("head_dim", "positions"))
    depth = half_depth({heads[0]: narrow, heads[1]: wide})
    length = half_depth({positions[1]: wide, positions[2]: long})
    limits = [(1 + depth / h) * (1 + length / p) / peaks[dtype] for h, p in zip(heads, positions, strict=True)]
    forward, backward = (
        geometric_mean(limit * each[way] for limit, each in zip(limits, measured, strict=True))
        for way in ("forward", "backward")
    )
    return dict(zip(names, (forward, backward, length, depth), strict=True))


def half_depth(rates: Mapping[int, float], least: int = 0) -> float:
    """Fit the size d at which a product reaches half its rate, if the rate at size n is proportional to n / (n + d)."""
    *sizes, largest = sorted(size for size in rates if size >= least)
    found = []
    for size in sizes:
        ratio = rates[largest] / rates[size]  # n (s + d) / (s (n + d)) for sizes n and s
        if ratio > 1 and largest > ratio * size:
            found.append(size * largest * (ratio - 1) / (largest - ratio * size))
    return median(found) if found else 0.0


def measured_link(rates: RankRates) -> Link:
    """Fit the link that explains the all-reduces of shared memory or NCCL as rings, or for one rank a copy."""
    if not rates.collectives:
        return Link(rates.memory_bandwidth / 2, rates.kernel)
    bandwidths, latencies = [], []
    for name, ranks in (("pairs", 2), ("all_reduce", rates.ranks)):
        measured = rates.collectives[name]
        bandwidths.append(2 * (ranks - 1) / ranks * measured.bandwidth)
        latencies.append(measured.latency / (2 * (log2(ranks) if measured.transport == NCCL else 1)))
    return Link(geometric_mean(bandwidths), geometric_mean(latencies))
