"""Measured rates of local ranks (products, attention, copies, collectives, the host's work) and fits to them."""

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
from torch import Tensor
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.doors import hook
from threefold.dtypes import DTYPES
from threefold.host import keep_freed_memory
from threefold.models.family import make_model, model_plan
from threefold.ops.kernels import linear
from threefold.planner.hardware import Link
from threefold.planner.model_size import ZERO_WEIGHTS
from threefold.train.step import Engine

_SMALL: Final = 256
"""Bytes of a message whose time is only latency."""
_LONGEST_PRODUCT: Final = 0.5
"""Longest product to measure, in seconds."""
_ATTENTION_WIDTH: Final = 256
"""Features of all heads together."""
NCCL: Final = "NCCL"
_BETWEEN: Final = 512
"""Size of the square product between collectives."""


class MeasuringEffort(NamedTuple):
    """Extent of the measurements: seconds of each, sizes of square matrices, and bytes of large messages and of the
    copied tensor.

    `attention` has (positions, head dim) of three measurements; two differ in head dim, the last two in positions.
    """

    seconds: float = 0.35
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    nbytes: int = 4 << 20
    attention: tuple[tuple[int, int], ...] = ((128, 32), (128, 128), (1024, 128))
    copied: int = 64 << 20  # more than caches hold


QUICK: Final = MeasuringEffort(
    seconds=0.03, sizes=(64, 256), nbytes=1 << 20, attention=((64, 32), (64, 64), (256, 64)), copied=8 << 20
)


class AttentionRate(NamedTuple):
    """FLOP/s of fused causal attention, without the masked part, for one sequence length and head dim."""

    positions: int
    head_dim: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Collective:
    """Measured collective: seconds of a small message (latency) and of a large one, `nbytes` of the large tensor."""

    latency: float
    seconds: float
    nbytes: int
    transport: str

    @property
    def bandwidth(self) -> float:
        return self.nbytes / max(self.seconds - self.latency, 1e-9)


@dataclass(frozen=True)
class RankRates:
    """Rates of one of several ranks while all do the same, averaged over them.

    Matrix rates are FLOP/s by dtype and size of square matrices; `memory_bandwidth` counts the bytes that a copy reads
    and writes. `kernel` has the seconds of a kernel on a few elements with autograd's work for it, `block` those of a
    minimal block's forward and backward pass, and the next three those of a block with weights sharded over the ranks,
    with tensor parallelism (the mean of pairs and of all ranks), and in pairs of context-parallel ranks.

    The collectives, empty for one rank, are `all_reduce`, `all_gather` and `reduce_scatter` of all ranks and, in
    simultaneous groups of two, `pairs` (an all-reduce), `send` (of the context-parallel ring) and `stages` (of pipeline
    stages, where they do not send like the ring).
    """

    ranks: int
    threads: int
    matrix: dict[str, dict[int, float]]
    attention: dict[str, list[AttentionRate]]
    memory_bandwidth: float
    kernel: float
    block: float = 0.0
    sharded_block: float = 0.0
    tensor_block: float = 0.0
    context_block: float = 0.0
    collectives: dict[str, Collective] = field(default_factory=dict)


def measure_ranks(info: Any, dtypes: Sequence[str], budget: MeasuringEffort, device: str = "cpu") -> RankRates:
    """Measure this rank while the others do the same. Collective over the world."""
    if device == "cpu":
        keep_freed_memory()  # as in a training rank
    world = dist.get_world_size()
    on = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    mesh = Mesh(Layout(dp=world // 2, tp=2) if world > 1 else Layout(), on)
    timer = _Timer(mesh, budget.seconds)
    matrix = {dtype: _products(timer, DTYPES[dtype], budget.sizes) for dtype in dtypes}
    source = torch.zeros(budget.copied // 4, device=on)
    target = torch.empty_like(source)
    tiny, links = torch.ones(64, device=on, requires_grad=True), 16

    def chain() -> None:
        out = tiny
        for _ in range(links):
            out = out + tiny
        torch.autograd.grad(out.sum(), tiny)

    return RankRates(
        ranks=world,
        threads=torch.get_num_threads(),
        matrix=matrix,
        attention={dtype: [_attention(timer, DTYPES[dtype], *shape) for shape in budget.attention] for dtype in dtypes},
        memory_bandwidth=2 * budget.copied / timer.of(lambda: target.copy_(source)),
        kernel=timer.of(chain) / (2 * links),
        block=measure_block(timer.of, world, on),
        sharded_block=measure_block(timer.of, world, on, zero=ZERO_WEIGHTS) if world > 1 else 0.0,
        tensor_block=mean(measure_block(timer.of, world, on, tp=tp) for tp in (2, world)) if world > 1 else 0.0,
        context_block=measure_block(timer.of, world, on, cp=2) if world > 1 else 0.0,
        collectives=_collectives(timer, mesh, budget.nbytes) if world > 1 else {},
    )


class _Timer:
    """Timer of an operation on all ranks at once, with measurements of `seconds` each."""

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        self.mesh, self.device, self._seconds = mesh, mesh.device, seconds

    def of(self, operation: Callable[[], object]) -> float:
        """Return the seconds of one call among many, equally many on every rank, averaged over the ranks."""
        operation()
        self._wait()
        started = time.perf_counter()
        operation()
        self._wait()
        once = self._mean(time.perf_counter() - started)
        repeats = max(2, int(self._seconds / max(once, 1e-7) / 2))
        found = []
        for _ in range(2):  # the faster half, in case another program disturbs one
            self.mesh.world.barrier()
            started = time.perf_counter()
            for _ in range(repeats):
                operation()
            self._wait()
            found.append(self._mean((time.perf_counter() - started) / repeats))
        return min(found)

    def _mean(self, seconds: float) -> float:
        total = self.mesh.world.all_reduce_values(torch.tensor([seconds], dtype=torch.float64, device=self.device))
        return float(total[0]) / self.mesh.world.size

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_LAYERS, _VOCAB, _LENGTH = 4, 32, 16
_FEW, _MANY = 1, 4
"""Micro-batches of the two steps whose difference cancels the fixed cost of a step."""


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


def measure_block(
    seconds_of: Callable[[Callable[[], object]], float],
    ranks: int,
    device: torch.device,
    *,
    tp: int = 1,
    cp: int = 1,
    zero: int = 0,
) -> float:
    """Return the seconds of one tiny block's forward and backward pass of a micro-batch. Collective over the world.

    Its kernels take almost no time, so that Python and autograd remain. `seconds_of` times an operation on all ranks at
    once; tp · cp divides `ranks`.
    """
    dp = ranks // (tp * cp)
    mesh = Mesh(Layout(dp=dp, tp=tp, cp=cp), device)
    configs = (tiny_config(micro_batches, dp, tp, cp, zero, device.type) for micro_batches in (_FEW, _MANY))
    times = []
    for config in configs:
        engine = Engine(partial(make_model, config.model), model_plan(config.model, _LENGTH), mesh, config)
        rows = torch.arange(config.train.global_batch_size).chunk(dp)[mesh.dp.index]
        tokens = torch.zeros(len(rows), _LENGTH, dtype=torch.int64)  # the engine takes them to the device
        step = map(partial(engine.train_step, Batch(tokens, tokens, rows)), count())
        times.append(seconds_of(partial(next, step)))
    return max(0.0, times[1] - times[0]) / ((_MANY - _FEW) * _LAYERS)


def _products(timer: _Timer, dtype: torch.dtype, sizes: Sequence[int]) -> dict[int, float]:
    """Return the FLOP/s of the models' linear layers by size, without sizes that would take long."""
    found: dict[int, float] = {}
    before, seconds = 0, 0.0
    for size in sizes:
        if before and seconds * (size / before) ** 3 > _LONGEST_PRODUCT:
            break
        x, weight = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
        with torch.no_grad():
            before, seconds = size, timer.of(partial(linear, x, weight))
        found[size] = 2 * size**3 / seconds
    return found


def _attention(timer: _Timer, dtype: torch.dtype, positions: int, head_dim: int) -> AttentionRate:
    shape = (2, _ATTENTION_WIDTH // head_dim, positions, head_dim)
    query, key, value = (torch.randn(shape, device=timer.device).to(dtype).requires_grad_() for _ in range(3))
    flops = 2 * 2 * 2 * _ATTENTION_WIDTH * positions**2 / 2  # two products, half of them masked
    grad = torch.randn(shape, device=timer.device).to(dtype)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), grad)

    seconds = timer.of(forward)
    return AttentionRate(positions, head_dim, flops / seconds, 2.5 * flops / max(timer.of(both) - seconds, 1e-9))


def _collectives(timer: _Timer, mesh: Mesh, nbytes: int) -> dict[str, Collective]:
    """Measure collectives of all ranks, and `pairs`, `send` and `stages` in simultaneous groups of two.

    Each follows a product, as in training: ranks that share cores arrive one after another, and a waiting rank yields
    its core. The time that a collective adds to the product is its cost.
    """
    world, pair = mesh.world, mesh.tp
    # the last number counts the ranks' parts of the whole tensor
    by_name: dict[str, tuple[Axis, Callable[[Tensor], Tensor], int]] = {
        "all_reduce": (world, world.all_reduce_, 1),
        "all_gather": (world, lambda tensor: world.all_gather_equal(tensor, 0), world.size),
        "reduce_scatter": (world, lambda tensor: world.reduce_scatter(tensor, 0), 1),
        "pairs": (pair, pair.all_reduce_, 1),
        "send": (pair, lambda tensor: pair.start_shift(tensor)(), 1),
    }
    if (stages := _send_of_stages(pair, nbytes)) is not None:
        by_name["stages"] = (pair, stages, 1)
    x = torch.randn(_BETWEEN, _BETWEEN, device=mesh.device)
    between = partial(linear, x, x)
    with torch.no_grad():
        alone = timer.of(between)
    sockets = NCCL if mesh.device.type == "cuda" else "gloo"
    found = {}
    for name, (axis, operation, parts) in by_name.items():
        times = []
        for whole in (_SMALL, nbytes):
            tensor = torch.zeros(max(1, whole // 4 // parts // world.size) * world.size, device=mesh.device)
            with torch.no_grad():
                both = timer.of(lambda: (between(), operation(tensor)))  # noqa: B023
                times.append(max(both - alone, 1e-7))
        transport = sockets if name == "send" or not axis.shares_memory else "shared memory"
        found[name] = Collective(times[0], times[1], nbytes, transport)
    return found


def _send_of_stages(pair: Axis, nbytes: int) -> Callable[[Tensor], Tensor] | None:
    """Return the exchange that pipeline stages do, for both ranks of a pair to call; None if they use `send`."""
    share_mailbox = hook("share_mailbox")
    if not pair.shares_memory or share_mailbox is None:
        return None
    mailbox, peer = share_mailbox(pair.group, nbytes, 1), 1 - pair.index
    if mailbox is None:
        return None

    def exchange(tensor: Tensor) -> Tensor:
        mailbox.begin()
        mailbox.send(tensor, peer)
        found = mailbox.receive(peer, mailbox.expect(peer), tensor.shape, tensor.dtype)
        mailbox.finish()
        return found

    return exchange


def attention_shares(rates: RankRates, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of attention, in the first dtype that has rates, and the sizes that reach half of them."""
    dtype = next((dtype for dtype in peaks if rates.attention.get(dtype)), None)
    names = "attention", "attention_backward", "attention_length", "attention_depth"
    if dtype is None:
        return dict(zip(names, (0.5, 0.5, 0.0, 0.0), strict=True))
    narrow, wide, long = rates.attention[dtype]
    # FLOP/s of both passes; the backward pass has 2.5 times the operations of the forward pass.
    both = {each: 3.5 / (1 / each.forward + 2.5 / each.backward) for each in (narrow, wide, long)}
    depth = half_depth({each.head_dim: both[each] for each in (narrow, wide)})
    length = half_depth({each.positions: both[each] for each in (wide, long)})
    shares = [
        (1 + depth / each.head_dim) * (1 + length / each.positions) * rate / peaks[dtype]
        for each in (narrow, wide, long)
        for rate in each[-2:]
    ]
    values = geometric_mean(shares[::2]), geometric_mean(shares[1::2]), length, depth
    return dict(zip(names, values, strict=True))


def half_depth(rates: Mapping[int, float], least: int = 0) -> float:
    """Fit the size d at which a product reaches half its rate, if the rate at size n is proportional to n / (n + d)."""
    sizes = sorted(size for size in rates if size >= least)
    largest = sizes[-1]
    found = []
    for size in sizes[:-1]:
        ratio = rates[largest] / rates[size]  # n (s + d) / (s (n + d)) for sizes n and s
        if ratio > 1 and largest > ratio * size:
            found.append(size * largest * (ratio - 1) / (largest - ratio * size))
    return median(found) if found else 0.0


def measured_link(rates: RankRates) -> Link:
    """Fit the link that explains the collectives of shared memory or NCCL as rings, or for one rank a copy."""
    if not rates.collectives:
        return Link(rates.memory_bandwidth / 2, rates.kernel)
    bandwidths, latencies = [], []
    for name, ranks in (("pairs", 2), ("all_reduce", rates.ranks)):
        measured = rates.collectives[name]
        bandwidths.append(2 * (ranks - 1) / ranks * measured.bandwidth)
        latencies.append(measured.latency / (2 * (log2(ranks) if measured.transport == NCCL else 1)))
    return Link(geometric_mean(bandwidths), geometric_mean(latencies))
