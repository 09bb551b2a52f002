"""Seconds of a pipeline's micro-batches, from those of each rank's passes: closed forms of the schedules.

With p ranks of equal stages and m micro-batches a rank computes m of them and waits for the bubble: (p - 1) times what
one of its v stages takes for a micro-batch (Narayanan et al., arXiv 2104.04473, section 2.2). With unequal stages the
slowest rank computes all the while, and fills and drains through the others. Schedules that defer the gradients of
weights compute those in the bubble, of which (p - 1)(F + B - W) is left (Qi et al., arXiv 2401.10241, table 1).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from threefold.plan.cost.kernels import positive

_DEFERRING: Final = ("zero-bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of weights in the bubble."""


class Pipeline(NamedTuple):
    """Seconds of all micro-batches of a step.

    Attributes:
        busy: of the rank with the most to compute.
        bubble: in which it waits, sends aside.
        sends: transfers that no computation hides.
    """

    busy: float
    bubble: float
    sends: float

    @property
    def total(self) -> float:
        return self.busy + self.bubble + self.sends


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    schedule: str,
    chunks: int,
    micro_batches: int,
    send: float = 0.0,
    overlapped: bool = False,
) -> Pipeline:
    """The time of a step's forward and backward passes.

    Args:
        forward: seconds of a micro-batch's forward pass through all stages of each rank.
        backward, weight: the same, of the backward pass for gradients of inputs and of weights.
        schedule: as in `parallel.schedule`; one of a file counts as `1f1b`.
        chunks: stages of each rank.
        micro_batches: of a step.
        send: seconds that a stage's output takes to the next rank.
        overlapped: whether sends run beside computing once the pipeline is full.
    """
    ranks = len(forward)
    totals = [sum(parts) for parts in zip(forward, backward, weight, strict=True)]
    slowest = max(range(ranks), key=totals.__getitem__)
    busy = micro_batches * totals[slowest]
    if ranks == 1:
        return Pipeline(busy, 0.0, 0.0)
    others = bubble_seconds(sum(totals), totals[slowest], sum(weight), weight[slowest], schedule, chunks, micro_batches)
    return Pipeline(busy, others, send_waits(ranks, chunks, micro_batches, send, overlapped))


def bubble_seconds(
    everything: float,
    slowest: float,
    weights: float,
    of_slowest: float,
    schedule: str,
    chunks: int,
    micro_batches: int,
) -> float:
    """In which the slowest rank waits while the others fill and drain; or, with fewer micro-batches than ranks, for the
    next stage's turn, as a micro-batch goes through all stages one after the other.

    Args:
        everything: seconds of a micro-batch through all ranks.
        slowest: of it, those of the slowest rank.
        weights, of_slowest: of both, those of gradients of weights.
        schedule, chunks, micro_batches: as of `pipeline_seconds`.
    """
    waits, through = (everything - slowest) / chunks, everything
    if schedule in _DEFERRING:  # (p - 1)(F + B - W) of (p - 1)(F + B + W) is left
        waits = positive(waits - 2 * (weights - of_slowest) / chunks)
        through = everything - weights
    through = through + (micro_batches - 1) * slowest / chunks
    return waits + positive(through - micro_batches * slowest - waits)


def send_waits(ranks: int, chunks: int, micro_batches: int, send: float, overlapped: bool) -> float:
    """Transfers that no computation hides; arguments as of `pipeline_seconds`."""
    hops = 2 * (ranks - 1)  # to the last rank and back
    steady = 0.0 if overlapped and chunks > 1 else 2 * chunks * micro_batches * send
    return hops * send + steady
