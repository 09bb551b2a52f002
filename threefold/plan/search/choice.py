"""A layout that the search considers: the values of every setting that it may choose."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from threefold.comm.layout import Layout
from threefold.comm.layout_spec import LayoutSpec
from threefold.config.schedules import SCHEDULES

KEYS: Final = {
    "dp": "parallel.dp",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "ep": "parallel.ep",
    "zero": "parallel.zero",
    "schedule": "parallel.schedule",
    "stage_chunks": "parallel.stage_chunks",
    "micro_batch_size": "train.micro_batch_size",
    "accumulation": "train.gradient_accumulation_steps",
    "recompute": "train.recompute",
    "sequence_parallel": "parallel.sequence_parallel",
}
"""Part of a `LayoutChoice` → its setting."""
FOLLOWING: Final = ("parallel.zero_shards", "parallel.fallbacks", "train.recompute_every")
"""Settings that a config gives for its own layout; in another one they have their defaults."""
_DEFAULTS: Final = {
    "parallel.schedule": next(iter(SCHEDULES)),
    "parallel.zero": 0,
    "parallel.sequence_parallel": False,
    "train.recompute": "none",
}


class LayoutChoice(NamedTuple):
    """One layout.

    Attributes:
        dp, tp, pp, cp: ranks along each axis; their product is the number of GPUs.
        ep: of the dp replicas, how many share the experts.
        zero, schedule, stage_chunks, micro_batch_size, recompute, sequence_parallel: as the settings of these names.
        accumulation: micro-batches of a replica in a step.
    """

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero: int
    schedule: str
    stage_chunks: int
    micro_batch_size: int
    accumulation: int
    recompute: str
    sequence_parallel: bool

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def settings(self) -> dict[str, Any]:
        """`section.key` → value of every setting that makes it."""
        return {KEYS[name]: value for name, value in self._asdict().items()}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "LayoutChoice":
        """That of a mapping from `section.key` to values."""
        return cls(**{name: settings[key] for name, key in KEYS.items()})

    @property
    def spec(self) -> LayoutSpec:
        """The same as other commands write and read it, without the micro-batch."""
        given = {key: value for key, value in self.settings().items() if value != _DEFAULTS.get(key, value)}
        if self.schedule in SCHEDULES and SCHEDULES[self.schedule].stages_per_rank is None:
            given["parallel.stage_chunks"] = self.stage_chunks
        return LayoutSpec(Layout(self.dp, self.tp, self.pp, self.cp, self.ep), tuple(given.items()))

    def __str__(self) -> str:
        return f"{self.spec} micro-batch {self.micro_batch_size}"
