"""Cost model that is quick to compute, for tests of the search."""

from collections.abc import Callable

import numpy as np

from threefold.config import Config
from threefold.planner.hardware import Hardware
from threefold.planner.search.bounds import Array, Evaluated, Mask
from threefold.planner.search.space import LayoutChoice, MeshSizes, Options


class ToyCosts:
    """Times and sizes that depend on every part of a layout.

    Args:
        memory: bytes of a device.
        loose: fraction by which its time bounds stay below the exact time.
        loose_bytes: fraction by which its memory bounds stay below the exact memory.
    """

    def __init__(self, config: Config, memory: int = 4000, loose: float = 0.1, loose_bytes: float = 0) -> None:
        self.batch, self.memory, self.loose = config.train.global_batch_size, memory, loose
        self.loose_bytes = loose_bytes
        self.evaluated = 0
        self.tokens = self.batch * config.data.sequence_length

    @classmethod
    def of(cls, config: Config, hardware: Hardware) -> "ToyCosts":
        return cls(config, hardware.memory_bytes)

    def usable_bytes(self, gpus: int) -> int:
        return self.memory

    def seconds(self, choice: LayoutChoice) -> float:
        waits = 1 + (choice.pp - 1) / (choice.accumulation * choice.stage_chunks)
        work = {"none": 3.0, "selective": 3.1, "full": 4.0}[choice.recompute]
        shared = 1 + 0.1 * np.log2(choice.tp) * (0.9 if choice.sequence_parallel else 1) + 0.05 * np.log2(choice.cp)
        return float(
            self.batch / (choice.dp * choice.tp * choice.cp * choice.pp) * work * shared * waits
            + 0.01 * choice.zero * np.log2(choice.dp * choice.cp)
            + 0.001 * len(choice.schedule)
            + 0.5 / choice.micro_batch_size
        )

    def bytes_of(self, choice: LayoutChoice) -> int:
        whole = 8000 // (choice.tp * choice.pp)
        shared = [0, 5, 6, 8][choice.zero] * whole // 8
        kept = {"none": 40, "selective": 30, "full": 4}[choice.recompute] * choice.micro_batch_size
        held = (
            min(choice.pp, choice.accumulation) * kept // (choice.cp * (choice.tp if choice.sequence_parallel else 1))
        )
        return whole - shared + shared // (choice.dp * choice.cp) + held

    def least_bytes(self, mesh: MeshSizes, options: Options) -> Array:
        return self._all(self.bytes_of, mesh, options) * (1 - self.loose_bytes)

    def least_seconds(self, mesh: MeshSizes, options: Options, wanted: Mask) -> Array:
        return np.where(wanted, self._all(self.seconds, mesh, options) * (1 - self.loose), np.nan)

    def _all(self, of: Callable[[LayoutChoice], float], mesh: MeshSizes, options: Options) -> Array:
        found = np.zeros(options.shape)
        for place in np.ndindex(options.shape):
            found[place] = of(options.choice(mesh, place))
        return found

    def evaluate(self, choice: LayoutChoice) -> Evaluated:
        self.evaluated += 1
        seconds = self.seconds(choice)
        return Evaluated(choice, seconds, self.tokens / seconds, 0.5, (self.bytes_of(choice),), (("toys", 0.1),))

    def largest_part(self, choice: LayoutChoice) -> str:
        return f"weights {8000 // (choice.tp * choice.pp)} bytes"
