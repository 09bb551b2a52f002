"""Checks of a run's config against its data and this machine, before anything is written or started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from threefold.comm.layout import Layout
from threefold.config import Config, resolve
from threefold.config.by_step import entries_of
from threefold.config.loading import config_of
from threefold.config.resolve import check_settings, on_device
from threefold.config.rules import require_rooms
from threefold.constants import PARITY_WIDE
from threefold.data.dataset import open_dataset
from threefold.doors import added, call_hook, hook, imported
from threefold.errors import UserError
from threefold.files import shown
from threefold.launch.device import choose_device, require_gpus
from threefold.launch.environment import find_launched_rank
from threefold.launch.launcher import joined_rank
from threefold.output import SILENT, Progress


@contextmanager
def naming_fallback(config: Config, layout: str) -> Iterator[None]:
    """Prefix a `UserError` of the block with the layout of the config's `parallel.fallbacks` that it concerns."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{config.origin('parallel.fallbacks')}parallel.fallbacks has {shown(layout)}, with which this run cannot "
            f"go on: {error}"
        ) from None


def resolve_run(config: Config) -> Config:
    """Resolve a config, as loaded, against its data and this machine, and check it."""
    return checked(config, SILENT).fitted()


def check_run(config: Config, progress: Progress = SILENT) -> Config:
    """Resolve and check a config as `resolve_run`, but leave its default micro-batch size, which needs no torch."""
    return checked(config, progress).resolved


@dataclass(frozen=True)
class CheckedConfig:
    """Config checked against its data and this machine, except for the memory of a step.

    Attributes:
        given: config as loaded, plus values that follow from the data alone.
        resolved: config with the default micro-batch size of a CPU.
        vocab_size: vocabulary size of the data.
        samples: number of training samples.
        local_world_size: ranks of this host.
        layout: layout of the config if it is one of the fallbacks; otherwise empty.
        fallbacks: by layout with which the ranks can continue, the checked config.
    """

    given: Config
    resolved: Config
    vocab_size: int
    samples: int
    local_world_size: int
    layout: str = ""
    fallbacks: "dict[str, CheckedConfig]" = field(default_factory=dict)

    def fitted(self) -> Config:
        """Return the config with the largest micro-batch size that fits into memory, unless settings determine it."""
        device = self.resolved.train.device
        largest = call_hook("fitting_micro_batch", self.given, self.vocab_size, device, self.local_world_size)
        if largest is None:
            return self.resolved
        return on_device(resolve(self.given, self.vocab_size, largest, self.samples), device)


def checked(config: Config, progress: Progress) -> CheckedConfig:
    """Check a config as loaded, and its fallbacks; `progress` shows the encoding of text, where that is needed."""
    from threefold.train.callbacks.registry import check_names

    if os.environ.get(PARITY_WIDE):
        config = config_of({**config.sections(), "precision": {"dtype": "fp64"}})
    check_settings(config)
    require_rooms(config)
    check_names(config.train.callbacks or ())
    for check in map(imported, added("RUN_CHECKS").values()):
        check(config)
    if not config.optimizer.is_built_in:
        from threefold.train.optimizers import check_optimizer  # imports torch, as the optimizer does

        check_optimizer(config.optimizer)
    launched, named, layout = joined_rank() or find_launched_rank(), "", Layout.from_config(config.parallel)
    fallbacks: dict[str, Config] = hook("fallbacks")(config) if config.parallel.fallbacks else {}
    if launched:
        if fallbacks and layout.world_size != launched.world_size:
            config, named = hook("in_world")(config, fallbacks, launched.world_size, launched.variables)
        else:
            layout.require_world(launched.world_size, launched.variables)
        fallbacks = {}  # the launcher starts the ranks
    local_world_size = launched.local_world_size if launched else layout.world_size
    if config.train.device == "cuda":
        require_gpus(local_world_size, config.parallel.backend)
    dataset = open_dataset(config)
    config = dataset.complete(config)
    resolved = resolve(config, dataset.vocab_size)
    train = dataset.samples("train", resolved.data, progress)
    if len(entries_of(resolved.data.sequence_length)) > 1:
        train.cut(1)  # refuses data whose samples have one length
    dataset.require_labels("train", train)
    if resolved.train.evaluates:
        dataset.require_labels("valid", dataset.samples("valid", resolved.data, progress))
    known, samples = dataset.vocab_size, len(train)
    if config.train.epochs is not None:
        resolved = resolve(config, known, samples=samples)
    device = choose_device(resolved.train.device, resolved.precision.dtype, local_world_size, resolved.parallel.backend)
    others = {}
    for name, fallback in fallbacks.items():
        with naming_fallback(config, name):
            given = dataset.complete(fallback)
            settled = resolve(given, known, samples=samples)
        ranks = Layout.from_config(given.parallel).world_size
        others[name] = CheckedConfig(given, on_device(settled, device), known, samples, ranks)
    return CheckedConfig(config, on_device(resolved, device), known, samples, local_world_size, named, others)
