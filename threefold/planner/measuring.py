"""Measured rates of local ranks (products, attention, copies, all-reduces, the host's work) and fits to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from math import log2
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
from threefold.host import keep_freed_memory
from threefold.models.family import make_model, model_plan
from threefold.ops.kernels import linear
from threefold.planner.hardware import Link
from threefold.planner.model_size import ZERO_WEIGHTS
from threefold.train.step import Engine

NCCL: Final = "NCCL"


class MeasuringEffort(NamedTuple):
    """Extent of the measurements."""

    seconds: float = 0.35  # of each measurement
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)  # of square matrices
    nbytes: int = 4 << 20  # of a large message
    attention: tuple[tuple[int, int], ...] = ((128, 32), (128, 128), (1024, 128))  # positions, head dim
    copied: int = 64 << 20  # bytes, more than caches hold


QUICK: Final = MeasuringEffort(0.03, (64, 256), 1 << 20, ((64, 32), (64, 64), (256, 64)), 8 << 20)
ON_GPUS: Final = MeasuringEffort(
    sizes=(512, 1024, 2048, 4096, 8192),
    nbytes=256 << 20,
    attention=((2048, 64), (2048, 128), (8192, 128)),
    copied=1 << 30,
)


@dataclass(frozen=True)
class AttentionRate:
    """FLOP/s of fused causal attention, without the masked part, for one sequence length and head dim."""

    positions: int
    head_dim: int
    forward: float
    backward: float


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
    attention: dict[str, list[AttentionRate]]
    memory_bandwidth: float  # of the bytes that a copy reads and writes
    kernel: float  # seconds of a kernel on a few elements with autograd's work for it
    block: float = 0.0  # seconds of a minimal block's forward and backward pass
    sharded_block: float = 0.0  # the same with its weights sharded over the ranks
    tensor_block: float = 0.0  # with tensor parallelism, the mean of pairs and of all ranks
    context_block: float = 0.0  # in pairs of context-parallel ranks
    collectives: dict[str, Collective] = field(default_factory=dict)  # `all_reduce` of all ranks, and of `pairs`


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

    several = world > 1
    return RankRates(
        ranks=world,
        threads=torch.get_num_threads(),
        matrix={dtype: _products(timed, DTYPES[dtype], effort.sizes, on) for dtype in dtypes},
        attention={
            each: [_attention(timed, DTYPES[each], on, *shape) for shape in effort.attention] for each in dtypes
        },
        memory_bandwidth=2 * effort.copied / timed(lambda: target.copy_(source)),
        kernel=timed(chain) / 32,
        block=block(),
        sharded_block=block(zero=ZERO_WEIGHTS) if several else 0.0,
        tensor_block=mean(block(tp=tp) for tp in (2, world)) if several else 0.0,
        context_block=block(cp=2) if several else 0.0,
        collectives=_all_reduces(timed, mesh, effort.nbytes) if several else {},
    )


_Timed = Callable[[Callable[[], object]], float]


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
def tiny_config(
    micro_batches: int = _FEW, dp: int = 1, tp: int = 1, cp: int = 1, zero: int = 0, device: str = "cpu"
) -> Config:
    """Return a resolved config of a minimal GPT with `micro_batches` per data-parallel rank of a layout."""
    given: dict[str, Any] = {
        "model": {"num_layers": _LAYERS, "hidden_size": 32, "num_attention_heads": 8, "vocab_size": _VOCAB},
        "data": {"path": "none", "sequence_length": _LENGTH},
        "parallel": {"dp": dp, "tp": tp, "cp": cp, "zero": zero},
        "train": {"global_batch_size": dp * micro_batches, "micro_batch_size": 1, "device": device},
    }
    return resolve(Config.model_validate(given), _VOCAB)


def measure_block(timed: _Timed, ranks: int, device: torch.device, tp: int = 1, cp: int = 1, zero: int = 0) -> float:
    """Return the seconds of one tiny block's forward and backward pass of a micro-batch. Collective over the world.

    Its kernels take almost no time, so that Python and autograd remain; tp · cp divides `ranks`.
    """
    dp = ranks // (tp * cp)
    mesh, times = Mesh(Layout(dp=dp, tp=tp, cp=cp), device), []
    for micro_batches in (_FEW, _MANY):
        config = tiny_config(micro_batches, dp, tp, cp, zero, device.type)
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


def _attention(timed: _Timed, dtype: torch.dtype, device: torch.device, positions: int, head_dim: int) -> AttentionRate:
    shape = (2, 256 // head_dim, positions, head_dim)
    query, key, value, grad = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(4))
    flops = 2 * 2 * 2 * 256 * positions**2 / 2  # two products, half of them masked
    forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    seconds = timed(forward)
    both = timed(lambda: torch.autograd.grad(forward(), (query, key, value), grad.detach()))
    return AttentionRate(positions, head_dim, flops / seconds, 2.5 * flops / max(both - seconds, 1e-9))


def _all_reduces(timed: _Timed, mesh: Mesh, nbytes: int) -> dict[str, Collective]:
    """Measure an all-reduce of all ranks, and of simultaneous pairs.

    Each follows a product, as in training: ranks that share cores arrive one after another, and a waiting rank yields
    its core. The time that it adds to the product is its cost.
    """
    x, found = torch.randn(512, 512, device=mesh.device), {}
    with torch.no_grad():
        alone = timed(partial(linear, x, x))
        for name, axis in (("all_reduce", mesh.world), ("pairs", mesh.tp)):
            small, large = (torch.zeros(size // 4, device=mesh.device) for size in (256, nbytes))
            both = [timed(lambda: (linear(x, x), axis.all_reduce_(tensor))) for tensor in (small, large)]  # noqa: B023
            latency, seconds = (max(each - alone, 1e-7) for each in both)
            transport = "shared memory" if axis.shares_memory else NCCL if mesh.device.type == "cuda" else "gloo"
            found[name] = Collective(latency, nbytes / max(seconds - latency, 1e-9), transport)
    return found


def attention_shares(rates: RankRates, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of attention, in the first dtype that has rates, and the sizes that reach half of them."""
    names = "attention", "attention_backward", "attention_length", "attention_depth"
    dtype = next((dtype for dtype in peaks if rates.attention.get(dtype)), None)
    if dtype is None:
        return dict(zip(names, (0.5, 0.5, 0.0, 0.0), strict=True))
    narrow, wide, long = measured = rates.attention[dtype]
    # FLOP/s of both passes; the backward pass has 2.5 times the operations of the forward pass.
    both = {each: 3.5 / (1 / each.forward + 2.5 / each.backward) for each in measured}
    depth = half_depth({each.head_dim: both[each] for each in (narrow, wide)})
    length = half_depth({each.positions: both[each] for each in (wide, long)})
    limits = [(1 + depth / each.head_dim) * (1 + length / each.positions) / peaks[dtype] for each in measured]
    forward = geometric_mean(limit * each.forward for limit, each in zip(limits, measured, strict=True))
    backward = geometric_mean(limit * each.backward for limit, each in zip(limits, measured, strict=True))
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
