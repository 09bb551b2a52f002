"""How many micro-batches a rank holds while it works off its actions: what activations need memory for."""

from collections.abc import Sequence
from typing import NamedTuple

from threefold.config.schedule_actions import Action


class HeldPasses(NamedTuple):
    """The most that a rank holds at once, in passes of a micro-batch through one stage.

    Attributes:
        until_weights: passes whose weight gradients are not computed, as if they kept all activations until then.
        until_backward: passes whose activations wait for their backward pass.
        deferred: passes that have had their backward pass and wait for their weight gradients.
    """

    until_weights: int
    until_backward: int
    deferred: int


def held_by_rank(order: Sequence[Action]) -> HeldPasses:
    """What a rank holds at most, each of the three at a time of its own.

    A pass begins to hold when it begins, and ends when its action has ended. `peak_bytes` has the time of the largest
    sum.
    """
    waiting = deferred = most = most_waiting = most_deferred = 0
    for _, kind, _ in order:
        if kind == "F":
            waiting += 1
        elif kind == "B":
            waiting -= 1
        elif kind == "I":
            waiting, deferred = waiting - 1, deferred + 1
        else:
            deferred -= 1
        most = max(most, waiting + deferred)
        most_waiting, most_deferred = max(most_waiting, waiting), max(most_deferred, deferred)
    return HeldPasses(most, most_waiting, most_deferred)


def peak_bytes(order: Sequence[Action], activations: Sequence[float], deferred: Sequence[float]) -> float:
    """The most bytes of activations that a rank holds at once.

    Args:
        order: its actions.
        activations: bytes that a forward pass keeps for the backward pass, per stage of the pipeline.
        deferred: bytes that remain from the backward pass for the input (`I`) until that for the weights (`W`), per
            stage.
    """
    held = most = 0.0
    for stage, kind, _ in order:
        if kind == "F":
            held += activations[stage]
        elif kind == "B":
            held -= activations[stage]
        elif kind == "I":
            most = max(most, held + deferred[stage])  # what remains is there before what is not is freed
            held += deferred[stage] - activations[stage]
        else:
            held -= deferred[stage]
        most = max(most, held)
    return most


def peak_micro_batches(orders: Sequence[Sequence[Action]]) -> list[float]:
    """Per rank the most micro-batches that it holds at once until their weight gradients are computed, in micro-batches
    of all its layers: a pass through one of v stages is 1/v of one."""
    return [held_by_rank(order).until_weights / max(1, len({action[0] for action in order})) for order in orders]
