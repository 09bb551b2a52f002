"""Batch arithmetic: global = micro · accumulation · dp, in sequences."""

from typing import NamedTuple

from threefold.config.problem import nearest_multiple, problem
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
    if micro:
        return BatchSizes(total, micro, _quotient(config, total, dp, f" · micro_batch_size {micro}", micro))
    if steps:
        return BatchSizes(total, _quotient(config, total, dp, f" · gradient_accumulation_steps {steps}", steps), steps)
    share = _quotient(config, total, dp, "", 1)
    micro = _default_micro_batch(share, config.parallel.pp)
    return BatchSizes(total, micro, share // micro)


def _quotient(config: Config, total: int, dp: int, named: str, factor: int) -> int:
    """total / (dp · factor), which must be whole."""
    divisor = dp * factor
    if total % divisor:
        nearest = nearest_multiple(total, divisor)
        rule = f"must be a multiple of dp {dp}{named}" + (f" = {divisor}" if named else "")
        raise problem(config, "train.global_batch_size", f"{rule}; use {nearest}", value=total)
    return total // divisor


def _default_micro_batch(share: int, stages: int) -> int:
    """Largest divisor of a replica's share that is small and keeps a pipeline busy."""
    wanted = 2 * stages if stages > 1 else 1
    sizes = [
        size for size in range(1, LARGEST_DEFAULT_MICRO_BATCH + 1) if share % size == 0 and share // size >= wanted
    ]
    return max(sizes, default=1)
