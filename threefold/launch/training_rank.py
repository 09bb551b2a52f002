"""The worker function of a training run: what each rank calls with what its launcher gives it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.checkpoint.resume import Resume
from threefold.config import Config
from threefold.launch.worker import RankInfo
from threefold.train.recovery.attempt import Attempt

if TYPE_CHECKING:
    from threefold.models.source import ModelSource
    from threefold.train.callbacks.base import Callback
    from threefold.train.entry_point import SelfCheck
    from threefold.train.profiling.profiler import ProfileRequest
    from threefold.train.stop import Stopped


def train_as_rank(
    info: RankInfo,
    config: Config,
    run_dir: Path,
    resume: Resume,
    began: float,
    attempt: Attempt,
    profile_steps: int = 0,
    check: "SelfCheck | None" = None,
    callbacks: "Sequence[Callback]" = (),
    source: "ModelSource | None" = None,
) -> "Stopped | None":
    """Train as one rank; arguments and result are those of `threefold.train.entry_point.train`.

    Args:
        profile_steps: how many are profiled; 0 for none.
    """
    from threefold.models.source import ConfigSource
    from threefold.train.entry_point import train

    return train(
        config,
        run_dir,
        resume,
        info.asked,
        info.local_rank == 0,
        callbacks,
        source or ConfigSource(),
        began,
        info.heartbeat,
        attempt,
        peak_rate_of(info, config.precision.dtype),
        _request(profile_steps) if profile_steps else None,
        check,
    )


def import_parts(config: Config) -> None:
    """Import what `train_as_rank` imports with a config, for ranks that are forked from this process.

    Args:
        config: resolved.

    Raises:
        UserError: a part of another package or of the user cannot be imported.
    """
    import threefold.launch.hangs.beats
    import threefold.launch.hangs.flight_recorder
    import threefold.plan.hardware.of_machine  # noqa: F401
    from threefold.train.entry_point import import_named

    import_named(config)


def _request(steps: int) -> "ProfileRequest":
    from threefold.plan.pictures.run_timeline import draw_run_timeline
    from threefold.train.profiling.profiler import ProfileRequest

    return ProfileRequest(steps, draw_run_timeline)


def peak_rate_of(info: RankInfo, dtype: str) -> float | None:
    """FLOP/s that a rank can reach at most in a dtype of the config; None where that is not known."""
    from threefold.plan.hardware.of_machine import peak_rate

    if info.device == "cpu":
        return peak_rate(dtype, "cpu", info.local_world_size)
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return peak_rate(dtype, "cuda", info.local_world_size, (properties.name, properties.total_memory))
