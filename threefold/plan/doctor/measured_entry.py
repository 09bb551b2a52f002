"""The hardware entry of this machine, from what ranks on it have reached together."""

from collections.abc import Mapping
from dataclasses import replace
from math import log2
from statistics import geometric_mean, median

from threefold.plan.cost.block import block_seconds
from threefold.plan.cost.sizes import block_of
from threefold.plan.cost.system import SYSTEMS
from threefold.plan.doctor.examination import Examination
from threefold.plan.doctor.host_work import tiny_config
from threefold.plan.doctor.measuring import NCCL, RankRates
from threefold.plan.hardware.catalogue import THIS_MACHINE
from threefold.plan.hardware.entry import Achievable, Hardware, Link
from threefold.plan.hardware.of_machine import entry_of_gpu

_LEAST_SIZE = 128
_GIB = 1 << 30


def measured_entry(found: Examination) -> Hardware | None:
    """The entry `this-machine`; None where no ranks could be measured.

    Rates are those that each of the most ranks that were measured reached while all computed, so that nothing is left
    for a fraction of them; only the depth of a product at which it reaches half of its rate is fitted.
    """
    several = [rates for rates in found.rates if any(rates.matrix.values())]
    if not several:
        return None
    most = several[-1]
    ranks, machine = most.ranks, found.machine
    rates = {dtype: max(sizes.values()) for dtype, sizes in most.matrix.items() if sizes}
    fp32 = most.matrix.get("fp32") or next(sizes for sizes in most.matrix.values() if sizes)
    depth = half_depth(fp32)
    largest = max(fp32)
    peaks = {dtype: rate * (1 + depth / largest) for dtype, rate in rates.items()}
    if found.device == "cuda":
        gpu = machine.gpus[0].name if machine.gpus else "GPU"
        title, memory = gpu, _gpu_memory(gpu)
    else:
        title, memory = machine.processor, max(1, machine.memory // ranks)
    link = measured_link(most)
    reached = Achievable(
        matrix=1.0,
        matrix_depth=depth,
        attention=_share(most.attention, peaks),
        attention_backward=_share(most.attention_backward, peaks),
        attention_length=1e-6,
        attention_depth=1e-6,
        memory=1.0,
        link=1.0,
        network=1.0,
        kernel=most.kernel,
        step=0.0,
    )
    entry = Hardware(
        name=THIS_MACHINE,
        title=title,
        device=found.device,
        matrix_rates=peaks,
        memory_bytes=memory,
        memory_bandwidth=most.memory_bandwidth,
        multiprocessors=1,
        gpus_per_node=ranks,
        inside=link,
        between=link,
        achievable=reached,
        cores=machine.cores if found.device == "cpu" else 0,
        sources=(
            f"threefold doctor on {machine.host}: {ranks} local ranks of {most.threads} threads at the same time",
        ),
    )
    sharded = max(0.0, most.sharded_block - most.block) if found.device == "cpu" else 0.0
    return replace(entry, achievable=replace(reached, block=_host_work(most, entry), sharded_block=sharded))


def _host_work(rates: RankRates, entry: Hardware) -> float:
    """Of the measured block, what its kernels do not explain; on a GPU, whose kernels run beside it, all of it."""
    if entry.device == "cuda":
        return rates.block
    config, system = tiny_config(), SYSTEMS["own-cpu"]
    kernels = block_seconds(block_of(config, 0, 1, system), entry, system).total if rates.block else 0.0
    return max(0.0, rates.block - kernels)


def half_depth(rates: Mapping[int, float]) -> float:
    """The size d at which a product reaches half of a rate, where its rate at size n is that times n / (n + d).

    Args:
        rates: FLOP/s by size.
    """
    sizes = sorted(size for size in rates if size >= _LEAST_SIZE) or sorted(rates)
    largest = sizes[-1]
    found = []
    for size in sizes[:-1]:
        ratio = rates[largest] / rates[size]  # n (s + d) / (s (n + d)) of sizes n and s
        if ratio > 1 and largest > ratio * size:
            found.append(size * largest * (ratio - 1) / (largest - ratio * size))
    return median(found) if found else 0.0


def measured_link(rates: RankRates) -> Link:
    """The link that explains the collectives of shared memory or NCCL as rings; of one rank alone, that of a copy."""
    if not rates.collectives:
        return Link(rates.memory_bandwidth / 2, rates.kernel)
    groups = {"pairs": 2, "all_reduce": rates.ranks}
    bandwidths, latencies = [], []
    for name, ranks in groups.items():
        measured = rates.collectives[name]
        bandwidths.append(2 * (ranks - 1) / ranks * measured.bandwidth)
        latencies.append(measured.latency / (2 * (log2(ranks) if measured.transport == NCCL else 1)))
    return Link(geometric_mean(bandwidths), geometric_mean(latencies))


def _share(rates: Mapping[str, float], peaks: Mapping[str, float]) -> float:
    """Of the rate of products, what attention reaches, in the first dtype."""
    return next((rates[dtype] / peaks[dtype] for dtype in peaks if rates.get(dtype)), 0.5)


def _gpu_memory(name: str) -> int:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    entry = entry_of_gpu(name, 0)
    return entry.memory_bytes if entry is not None else 16 * _GIB
