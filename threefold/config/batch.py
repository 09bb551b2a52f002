"""Batch arithmetic: global = micro · accumulation · dp, in sequences."""

from typing import NamedTuple

from threefold.config.pipeline_checks import accepts
from threefold.config.problem import divisors, nearest_divisor, nearest_multiple, problem
from threefold.config.schema import Config

DEFAULT_GLOBAL_BATCH_SIZE = 32
LARGEST_DEFAULT_MICRO_BATCH = 4


class BatchSizes(NamedTuple):
    """The three sizes of `train`, all known."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def batch_sizes(config: Config) -> BatchSizes:
    """Derive the sizes that were not given from those that were.

    The global batch never follows from the layout alone, or another dp would train another model: what is not given is
    32, and a layout that cannot divide it is refused.

    Raises:
        UserError: the sizes given disagree, or one does not divide the other.
    """
    train, dp = config.train, config.parallel.dp
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps
    if micro and steps:
        product = micro * steps * dp
        if total and total != product:
            raise problem(
                config,
                "train.global_batch_size",
                f"must be micro_batch_size {micro} · gradient_accumulation_steps {steps} · dp {dp} = {product}; "
                f"set it to {product} or leave one of the three out",
            )
        return BatchSizes(product, micro, steps)
    total = total or DEFAULT_GLOBAL_BATCH_SIZE
    share = _share(config, total)
    if micro:
        return BatchSizes(total, micro, _quotient(config, share, "train.micro_batch_size"))
    if steps:
        return BatchSizes(total, _quotient(config, share, "train.gradient_accumulation_steps"), steps)
    micro = _default_micro_batch(config, share)
    return BatchSizes(total, micro, share // micro)


def _share(config: Config, total: int) -> int:
    """Sequences of one replica in a step."""
    dp = config.parallel.dp
    if total % dp:
        rule = f"must be a multiple of parallel.dp {dp}; use {nearest_multiple(total, dp)}"
        raise problem(config, "train.global_batch_size", rule, value=total)
    return total // dp


def _quotient(config: Config, share: int, key: str) -> int:
    """share / (the setting `key`), which must be whole."""
    factor = int(getattr(config.train, key.split(".")[1]))
    if share % factor:
        total = share * config.parallel.dp
        rule = (
            f"must divide global_batch_size {total} / dp {config.parallel.dp} = {share}; "
            f"use {nearest_divisor(factor, share)}"
        )
        raise problem(config, key, rule)
    return share // factor


def _default_micro_batch(config: Config, share: int) -> int:
    """Largest divisor of a replica's share that is small and keeps a pipeline busy, by a number its schedule takes."""
    parallel = config.parallel
    wanted = 2 * parallel.pp if parallel.pp > 1 else 1
    counts = divisors(share)
    taken = [count for count in counts if accepts(parallel.schedule, parallel.pp, count)] or counts
    sizes = [share // count for count in taken]
    busy = [size for size in sizes if size <= LARGEST_DEFAULT_MICRO_BATCH and share // size >= wanted]
    return max(busy, default=min(sizes))
