"""Every layout of a number of GPUs: the meshes, and for each the options that its ranks have.

A mesh fixes the axes; its options are a product of five dims: how a micro-batch is computed (its size, sequence
parallelism, recompute), the pipeline's schedule with its chunks, and ZeRO. Arrays about the options of a mesh have
these dims in the order of `DIMS`, so that what depends on few of them stays small.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from threefold.config.divisors import divisors
from threefold.config.schedules import SCHEDULES, find_schedule
from threefold.config.schema import Config, ParallelConfig, TrainConfig
from threefold.plan.search.choice import LayoutChoice
from threefold.plan.search.soundness import Settings

DIMS: Final = ("micro_batch", "sequence_parallel", "recompute", "schedule", "zero")
_RECOMPUTE: Final[tuple[str, ...]] = get_args(TrainConfig.model_fields["recompute"].annotation)
_MOST_ZERO: Final = next(each.le for each in ParallelConfig.model_fields["zero"].metadata if hasattr(each, "le"))


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the axes.

    Attributes:
        dp, tp, pp, cp, ep: as in `parallel`.
        share: sequences of a replica in a step.
    """

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    share: int

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "parallel.dp": self.dp,
            "parallel.tp": self.tp,
            "parallel.pp": self.pp,
            "parallel.cp": self.cp,
            "parallel.ep": self.ep,
            "parallel.zero_shards": self.dp,
        }

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Space:
    """What there is to choose from.

    Args:
        config: resolved, in any layout; has the global batch and the model.
        layers: of the model's plan.
        fixed: settings that have one value only, `section.key` → value.
        schedules: the names and files that `parallel.schedule` may have.
    """

    def __init__(
        self, config: Config, layers: int, fixed: Mapping[str, Any], schedules: Sequence[str] = tuple(SCHEDULES)
    ) -> None:
        self.config, self.layers, self.fixed, self.schedules = config, layers, fixed, schedules
        self.global_batch_size = config.train.global_batch_size
        self._made: dict[object, tuple[Settings, ...]] = {}

    def meshes(self, gpus: int) -> Iterator[MeshSizes]:
        """The meshes of so many ranks, but for those whose replicas cannot divide the global batch."""
        experts = divisors(self.config.model.num_experts) if self.config.model.num_experts else [1]
        for tp in self._allowed("parallel.tp", divisors(gpus)):
            for pp in self._allowed("parallel.pp", divisors(gpus // tp)):
                for cp in self._allowed("parallel.cp", divisors(gpus // tp // pp)):
                    dp = gpus // (tp * pp * cp)
                    if self.global_batch_size % dp or not self._allowed("parallel.dp", [dp]):
                        continue
                    for ep in self._allowed("parallel.ep", [each for each in experts if dp % each == 0]):
                        yield MeshSizes(dp, tp, pp, cp, ep, self.global_batch_size // dp)

    def options(self, mesh: MeshSizes) -> "Options":
        """What the ranks of a mesh may do; meshes with the same values of a dim have the same tuple of them."""
        sharded, zero = mesh.tp > 1, mesh.dp * mesh.cp > 1
        shares = [False, True] if sharded else [False]
        return Options(
            self._once(("micro-batch", mesh.share), lambda: self._micro_batches(mesh.share)),
            self._once(("sp", sharded), lambda: self._single("parallel.sequence_parallel", shares)),
            self._once("recompute", lambda: self._single("train.recompute", _RECOMPUTE)),
            self._once(("schedule", mesh.pp), lambda: self._schedules(mesh.pp)),
            self._once(("zero", zero), lambda: self._single("parallel.zero", range(_MOST_ZERO + 1) if zero else [0])),
        )

    def _once(self, key: object, make: Callable[[], tuple[Settings, ...]]) -> tuple[Settings, ...]:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _micro_batches(self, share: int) -> tuple[Settings, ...]:
        sizes = self._allowed("train.micro_batch_size", divisors(share))
        both = [{"train.micro_batch_size": size, "train.gradient_accumulation_steps": share // size} for size in sizes]
        return tuple(
            each
            for each in both
            if self._allowed("train.gradient_accumulation_steps", [each["train.gradient_accumulation_steps"]])
        )

    def _schedules(self, pp: int) -> tuple[Settings, ...]:
        """Each schedule with each number of stages that a rank may have, so far as there are layers."""
        names = self.schedules if pp > 1 else self.schedules[:1]
        found = []
        for name in self._allowed("parallel.schedule", names):
            stages = find_schedule(name).stages_per_rank
            most = max(1, self.layers // pp)
            for chunks in self._allowed("parallel.stage_chunks", range(1, most + 1) if stages is None else [stages]):
                found.append({"parallel.schedule": name, "parallel.stage_chunks": chunks})
        return tuple(found)

    def _single(self, key: str, values: Sequence[Any]) -> tuple[Settings, ...]:
        return tuple({key: value} for value in self._allowed(key, values))

    def _allowed(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        if key not in self.fixed:
            return values
        return [value for value in values if value == self.fixed[key]]


@dataclass(frozen=True)
class Options:
    """The options of a mesh, dim by dim, each as settings."""

    micro_batch: tuple[Settings, ...]
    sequence_parallel: tuple[Settings, ...]
    recompute: tuple[Settings, ...]
    schedule: tuple[Settings, ...]
    zero: tuple[Settings, ...]

    @property
    def dims(self) -> tuple[tuple[Settings, ...], ...]:
        """Those of each dim of `DIMS`."""
        return self.micro_batch, self.sequence_parallel, self.recompute, self.schedule, self.zero

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.dims)

    def choice(self, mesh: MeshSizes, place: Sequence[int]) -> LayoutChoice:
        """The layout of a mesh at indices of each dim."""
        settings = dict(mesh.settings)
        for values, index in zip(self.dims, place, strict=True):
            settings |= values[index]
        return LayoutChoice.of(settings)
