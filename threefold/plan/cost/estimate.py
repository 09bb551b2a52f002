"""What a config's step takes on a type of hardware: time, throughput, utilisation and memory, with an error band."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from threefold.config import Config
from threefold.config.divisors import nearest_multiple
from threefold.errors import UserError
from threefold.models.flops import model_flops_per_token
from threefold.plan.cost.step import StepTime, step_time
from threefold.plan.cost.system import SYSTEMS, System, find_system
from threefold.plan.hardware.entry import Hardware
from threefold.plan.memory.stages import stage_memory, usable_bytes

_IN_PASSING = ("working", "logits", "buffers")
_SHARDED_GRADIENTS = 2  # values of parallel.zero


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a pipeline rank at the peak of a step.

    Attributes:
        causes: by cause.
        given_back: of them, what an allocator gives back where memory runs out.
    """

    causes: Mapping[str, int]
    given_back: int = 0

    @property
    def peak(self) -> int:
        return sum(self.causes.values())

    @property
    def by_dry_run(self) -> dict[str, int]:
        """By the causes that a dry run tells apart: activations with all that comes and goes."""
        found = dict(self.causes)
        found["activations"] += sum(found.pop(name, 0) for name in _IN_PASSING)
        return found


@dataclass(frozen=True)
class Estimate:
    """A training step as it is expected.

    Attributes:
        config: resolved.
        hardware: that it runs on.
        system: whose kernels and overlap it has.
        time: of a step, by cause.
        stages: memory of each pipeline rank.
        usable_bytes: that a rank may use.
    """

    config: Config
    hardware: Hardware
    system: System
    time: StepTime
    stages: tuple[StageBytes, ...]
    usable_bytes: int

    @property
    def step_seconds(self) -> float:
        return self.time.seconds

    @property
    def ranks(self) -> int:
        parallel = self.config.parallel
        return parallel.dp * parallel.tp * parallel.pp * parallel.cp

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.data.sequence_length

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens_per_step / self.step_seconds

    @cached_property
    def model_flops(self) -> float:
        """Operations of a step, over all ranks, that the model needs however it is computed."""
        per_token = model_flops_per_token(self.config.model, self.config.data.sequence_length)
        return (per_token or 0.0) * self.tokens_per_step

    @cached_property
    def hardware_flops(self) -> float:
        """Operations of a step that are computed: those of the model, and those that recompute repeats."""
        return self.model_flops + recomputed_flops_per_token(self.config) * self.tokens_per_step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the peak matrix rate that the model's operations take."""
        return self._share(self.model_flops)

    @property
    def hfu(self) -> float:
        """The same of the operations that are computed."""
        return self._share(self.hardware_flops)

    def _share(self, flops: float) -> float:
        rate = self.hardware.matrix_rate(self.config.precision.dtype)
        return flops / (self.step_seconds * self.ranks * rate)

    @property
    def peak_bytes(self) -> list[int]:
        """Of each pipeline rank."""
        return [stage.peak for stage in self.stages]

    @property
    def needed_bytes(self) -> list[int]:
        """Of each pipeline rank, without what an allocator gives back where memory runs out."""
        return [stage.peak - stage.given_back for stage in self.stages]

    @property
    def fits(self) -> bool:
        return max(self.needed_bytes) <= self.usable_bytes

    @property
    def error_band(self) -> tuple[float, float]:
        """Seconds between which a step is expected in nine cases of ten."""
        share = self.hardware.uncertainty
        return self.step_seconds / (1 + share), self.step_seconds * (1 + share)

    @property
    def limit(self) -> str:
        """The cause that takes longest."""
        causes = self.time.causes
        return max(causes, key=causes.__getitem__)

    def as_json(self) -> dict[str, Any]:
        """Plain values: seconds, bytes, operations."""
        return {
            "step_seconds": self.step_seconds,
            "error_band": list(self.error_band),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "hardware": self.hardware.name,
            "system": self.system.name,
            "ranks": self.ranks,
            "limited_by": self.limit,
            "seconds": {name: seconds for name, seconds in self.time.causes.items() if seconds},
            "memory": [stage.causes for stage in self.stages],
            "causes": [stage.by_dry_run for stage in self.stages],
        }


def usual_system(config: Config, hardware: Hardware) -> System:
    """The training system that is usual for such a run on such hardware, as published steps have it."""
    if hardware.device == "cpu":
        return own_system(config, hardware)
    sharded = hardware.sharded_system if config.parallel.zero >= _SHARDED_GRADIENTS else ""
    gpt = hardware.gpt_system if config.model.architecture == "gpt" else ""
    try:
        found = find_system(sharded or gpt or hardware.system)
    except UserError as error:
        raise UserError(f"The hardware entry {hardware.name} has an unknown system: {error}") from None
    return own_system(config, hardware) if found.name == "own" else found


def own_system(config: Config, hardware: Hardware) -> System:
    """This package as a training system: what `threefold train` takes and needs itself."""
    if hardware.device == "cpu":
        return SYSTEMS["own-cpu"]
    return SYSTEMS["own-compiled" if config.train.compile else "own"]


def estimate(config: Config, hardware: Hardware, system: System | str | None = None) -> Estimate:
    """What a step of a config takes.

    Args:
        config: resolved.
        hardware: an entry of the catalogue, or of one's own.
        system: a training system, or its name; None for this package.

    Raises:
        UserError: the ranks do not fill nodes; the hardware has no matrix rate for the dtype; the model is of one's
            own; the system is unknown.
    """
    parallel = config.parallel
    world = parallel.dp * parallel.tp * parallel.pp * parallel.cp
    _require_whole_nodes(config, hardware, world)
    hardware = hardware.shared_by(world)
    if system is None:
        system = own_system(config, hardware)
    elif isinstance(system, str):
        system = find_system(system)
    time = step_time(config, hardware, system)
    stages, usable = _memory(config, hardware, system)
    return Estimate(config, hardware, system, time, stages, usable)


def usable_memory(hardware: Hardware) -> int:
    """Bytes of a device that a rank may use.

    Raises:
        UserError: it has no more than the libraries take.
    """
    if hardware.device != "cuda":
        return hardware.memory_bytes
    usable = usable_bytes(hardware.memory_bytes)
    if usable <= 0:
        raise UserError(
            f"The hardware {hardware.name} has memory_bytes {hardware.memory_bytes} but a GPU needs more than the "
            f"{hardware.memory_bytes - usable} that CUDA and NCCL take; give it at least 8e9."
        )
    return usable


def recomputed_flops_per_token(config: Config) -> float:
    """Operations of a token's share of a step that recompute repeats, counted as `model_flops_per_token` counts."""
    train, model = config.train, config.model
    if train.recompute == "none":
        return 0.0
    whole = model_flops_per_token(model, config.data.sequence_length) or 0.0
    treated = -(-model.num_layers // train.recompute_every) / model.num_layers
    length = config.data.sequence_length
    windows = [min(model.window(layer) or length, length) for layer in range(model.num_layers)]
    core = 2 * 2 * model.num_attention_heads * model.head_dim * sum(windows)
    if train.recompute == "selective":
        return core * treated
    head = 2 * model.hidden_size * model.vocab_size
    return (whole / 3 - head) * treated


def _require_whole_nodes(config: Config, hardware: Hardware, world: int) -> None:
    per_node = hardware.gpus_per_node
    if hardware.fills_nodes(world):
        return
    rest = world // config.parallel.dp
    dp = next(dp for dp in range(config.parallel.dp, 0, -1) if dp == 1 or dp * rest % per_node == 0)
    better = f"use {dp}" if dp * rest % per_node == 0 else f"use {nearest_multiple(config.parallel.dp, per_node)}"
    raise UserError(
        f"parallel.dp is {config.parallel.dp}, which with the other axes makes {world:,} ranks, but nodes of "
        f"{hardware.name} have {per_node} and are rented whole; {better}."
    )


def _memory(config: Config, hardware: Hardware, system: System) -> tuple[tuple[StageBytes, ...], int]:
    found = stage_memory(config, hardware.device, system.name)
    return tuple(StageBytes(stage.causes, stage.given_back) for stage in found), usable_memory(hardware)
