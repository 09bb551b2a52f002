"""The peak memory of every pipeline stage by cause: states, activations in flight, working sets, buffers.

States are those of `plan.model_size`, kept activations those of `plan.activations` for the passes that the schedule's
own actions hold (`flight`), working sets those of `layers` at the largest moment of a pass (`walk`). Needs no torch.
"""

from dataclasses import asdict, dataclass
from typing import Final

from threefold.config import Config
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.plan.memory.layout_memory import LayoutMemory
from threefold.plan.memory.systems import keeps_of

RESERVE: Final = 2 << 30
"""Bytes of a GPU that tensors cannot have: the CUDA context and cuBLAS' workspaces (some 0.7 GiB) and the buffers of
NCCL's communicators (some 0.2 GiB for each of a handful of groups)."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of the pp axis at the moment of a step when it needs the most.

    Attributes:
        pp_rank: its coordinate on the pp axis.
        weights: of what it updates and computes with, gathered ones (ZeRO) among them.
        gradients: of weights.
        optimizer: its state.
        activations: kept for backward passes, of all micro-batches in flight.
        working: in passing in a block: gradients of activations, and what recompute computes again.
        logits: in passing in the head: logits, probabilities and their gradients.
        buffers: of collectives: gathers and reduce-scatters of ZeRO, receive buffers.
        fragmentation: what the allocator cannot use between tensors.
        given_back: of that, what it gives back where memory runs out: whole tensors' places that nothing fits into.
    """

    pp_rank: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    logits: int
    buffers: int
    fragmentation: int
    given_back: int = 0

    @property
    def causes(self) -> dict[str, int]:
        """Bytes by the name of the cause."""
        return {name: value for name, value in asdict(self).items() if name not in ("pp_rank", "given_back")}

    @property
    def peak(self) -> int:
        """All of it, as an allocator reports what it has reserved."""
        return sum(self.causes.values())

    @property
    def needed(self) -> int:
        """What has to be there."""
        return self.peak - self.given_back

    @property
    def tensors(self) -> int:
        """Without what the allocator loses."""
        return self.peak - self.fragmentation


def usable_bytes(memory_bytes: int) -> int:
    """What the tensors of a GPU may have of its memory."""
    return memory_bytes - RESERVE


def stage_memory(config: Config, device: str = "cuda", system: str = "own") -> list[StageMemory]:
    """The peak memory of each rank of the pp axis; of those at a place of it, the one that needs the most.

    Args:
        config: resolved.
        device: `cpu` or `cuda`, whose kernels keep different things.
        system: the training system, as `plan.memory.systems` knows them.

    Raises:
        UserError: the layers cannot be partitioned into the stages as the config says, the schedule is not for so many
            micro-batches, or the model is of a file, whose layers have no formulas.
    """
    if config.model.architecture == OWN:
        raise UserError(
            f"model.architecture is {OWN}, whose activations have no formulas; use threefold dry-run, which runs it."
        )
    layout = LayoutMemory(config, device, keeps_of(system, device))
    found = []
    for rank in range(config.parallel.pp):
        states, moment = layout.peak(rank)
        left = layout.narrow_logits if moment.logits else 0
        passing = moment.activations + moment.working + moment.logits + moment.buffers
        found.append(
            StageMemory(
                rank,
                int(states.weights + moment.weights),
                int(states.gradients + moment.gradients),
                int(states.optimizer),
                int(moment.activations),
                int(moment.working),
                int(moment.logits),
                int(moment.buffers),
                int(layout.keeps.fragmentation * (passing + left)) + left,
                left,
            )
        )
    return found
