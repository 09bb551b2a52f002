"""What a dry run finds out about a rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"


@dataclass(frozen=True)
class CollectiveTotal:
    """The collectives of one kind in a step.

    Attributes:
        axis, operation: as of `threefold.comm.mesh.Event`.
        count: how many.
        nbytes: of all together, each as `Event` counts it.
    """

    axis: str
    operation: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class DryRunReport:
    """One rank's memory, collectives and floating-point operations in one training step.

    Attributes:
        rank: its number.
        coordinates: its place on the axes `dp`, `pp`, `cp` and `tp`.
        world_size: ranks of the layout.
        layers: names of those that it has.
        micro_batches: of the step.
        parameters: elements that it updates.
        parameter_bytes: of these, and of the copies that it computes with.
        gradient_bytes: of the gradients that it updates with.
        optimizer_bytes: of the optimizer state.
        activation_bytes: the most that it needs beside these at any time: what is kept for the backward pass,
            temporary tensors, and buffers of collectives.
        peak_bytes: the most that is alive at once.
        at_peak: bytes at that time, by `weights`, `gradients`, `optimizer` and `activations`, which are all else.
        causes: the same with what ZeRO gathers for a while among `weights`, and whole gradients among `gradients`: as
            `threefold.plan.memory` counts them.
        collectives: that it takes part in.
        flops: floating-point operations of its matrix products and attention, recomputation included; a multiplication
            and an addition are two.
    """

    rank: int
    coordinates: Mapping[str, int]
    world_size: int
    layers: tuple[str, ...]
    micro_batches: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    at_peak: Mapping[str, int]
    causes: Mapping[str, int]
    collectives: Sequence[CollectiveTotal]
    flops: int
