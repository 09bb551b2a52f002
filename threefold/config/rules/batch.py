"""Batch arithmetic: global = micro · accumulation · dp, in sequences."""

from typing import NamedTuple

from threefold.config.config_error import problem
from threefold.config.divisors import divisors, nearest_divisor, nearest_multiple
from threefold.config.schema import Config

DEFAULT_GLOBAL_BATCH_SIZE = 32


class BatchSizes(NamedTuple):
    """The three sizes of `train`, all known."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def batch_sizes(config: Config, largest: int) -> BatchSizes:
    """Derive the sizes that were not given from those that were.

    The global batch never follows from the layout alone, or another dp would train another model: what is not given is
    32, and a layout that cannot divide it is refused.

    Args:
        config: as given.
        largest: sequences that a micro-batch has at most where its size is not given.

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
    sizes = _default_micro_batches(config, share)
    micro = next((size for size in sizes if size <= largest), sizes[-1])
    return BatchSizes(total, micro, share // micro)


def default_micro_batches(config: Config) -> list[int]:
    """What the default micro-batch may be, the largest first.

    Args:
        config: resolved.
    """
    return _default_micro_batches(config, config.train.global_batch_size // config.parallel.dp)


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


def _default_micro_batches(config: Config, share: int) -> list[int]:
    """Divisors of a replica's share that keep a pipeline busy, by a number of them that its schedule takes, the largest
    first; the smallest divisor where none does."""
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    wanted = 2 * parallel.pp if parallel.pp > 1 else 1
    counts = divisors(share)
    taken = [count for count in counts if schedule.accepts(parallel.pp, count)] or counts
    busy = [share // count for count in taken if count >= wanted]
    return busy or [share // taken[-1]]
