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
from threefold.plan.doctor.measuring import NCCL, AttentionRate, RankRates
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
    depth = half_depth(fp32, _LEAST_SIZE if max(fp32) >= _LEAST_SIZE else 0)
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
        memory=1.0,
        link=1.0,
        network=1.0,
        kernel=most.kernel,
        step=0.0,
    )
    reached = _with_attention(reached, most, peaks)
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
    if found.device == "cuda":  # whose kernels run beside what the host does
        return replace(entry, achievable=replace(reached, block=most.block))
    longer = {
        name: max(0.0, measured - most.block)
        for name, measured in (
            ("sharded_block", most.sharded_block),
            ("tensor_block", most.tensor_block),
            ("context_block", most.context_block),
        )
    }
    return replace(entry, achievable=replace(reached, block=_host_work(most, entry), **longer))


def _host_work(rates: RankRates, entry: Hardware) -> float:
    """Of the measured block, what its kernels do not explain."""
    config, system = tiny_config(), SYSTEMS["own-cpu"]
    kernels = block_seconds(block_of(config, 0, 1, system), entry, system).total if rates.block else 0.0
    return max(0.0, rates.block - kernels)


def _with_attention(reached: Achievable, rates: RankRates, peaks: Mapping[str, float]) -> Achievable:
    """With attention as shares of the rate of products, in the first dtype, and the sizes that have half of them."""
    dtype = next((dtype for dtype in peaks if rates.attention.get(dtype)), None)
    if dtype is None:
        return replace(reached, attention=0.5, attention_backward=0.5, attention_length=0.0, attention_depth=0.0)
    narrow, wide, long = rates.attention[dtype]
    depth = half_depth({each.head_dim: _of_both_passes(each) for each in (narrow, wide)})
    length = half_depth({each.positions: _of_both_passes(each) for each in (wide, long)})
    shares = [
        (1 + depth / each.head_dim) * (1 + length / each.positions) * rate / peaks[dtype]
        for each in (narrow, wide, long)
        for rate in each[-2:]
    ]
    return replace(
        reached,
        attention=geometric_mean(shares[::2]),
        attention_backward=geometric_mean(shares[1::2]),
        attention_length=length,
        attention_depth=depth,
    )


def _of_both_passes(rate: AttentionRate) -> float:
    """FLOP/s, where the backward pass has 2.5 times the operations of the forward pass."""
    return 3.5 / (1 / rate.forward + 2.5 / rate.backward)


def half_depth(rates: Mapping[int, float], least: int = 0) -> float:
    """The size d at which a product reaches half of a rate, where its rate at size n is that times n / (n + d).

    Args:
        rates: FLOP/s by size.
        least: size that counts.
    """
    sizes = sorted(size for size in rates if size >= least)
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


def _gpu_memory(name: str) -> int:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    entry = entry_of_gpu(name, 0)
    return entry.memory_bytes if entry is not None else 16 * _GIB
