"""Contributions of attached rooms to a run on its ranks (`threefold.doors`)."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

from threefold.checkpoint.manifest import AnomalyFacts, Checkpoint
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.data.corpus import Content
from threefold.data.dataset import Dataset
from threefold.data.loader import Loader
from threefold.data.samples import Samples
from threefold.doors import added, hook, imported
from threefold.models.source import ModelSource
from threefold.train.callbacks.base import Callback
from threefold.train.saving import SafeSaving
from threefold.train.state import KeptStates, StartingPoint
from threefold.train.step import Engine


class Profiler(Callback):
    """Callback that profiles some steps, whose parts the heartbeat of its rank tells it."""

    def observing(self, heartbeat: Heartbeat, device: torch.device) -> Heartbeat:
        """Return a heartbeat to use in place of the given one, which tells this profiler what the rank does, too."""
        raise NotImplementedError

    def attach(self, engine: Engine) -> None:
        """Take the engine of this rank, before the setup."""


class Checks:
    """Checks that the ranks of a run agree, of an attached room (`checks` of its `HOOKS`); by default none.

    Methods are called in their order, on all ranks alike, and raise a `UserError` on every rank.

    Args:
        reads: whether this rank reads the files of its host.
    """

    def __init__(self, config: Config, dataset: Dataset, reads: bool) -> None:
        self.config, self.dataset, self.reads = config, dataset, reads

    def on_start(self, samples: Iterable[Samples | None], source: ModelSource, heartbeat: Heartbeat) -> list[str]:
        """Check what decides the numbers of the run; return lines about what else differs."""
        return []

    def on_mesh(self, mesh: Mesh) -> None:
        """Check the data with the process groups of the mesh."""

    def on_folder(self, run_dir: Path, mesh: Mesh) -> None:
        """Check the folder of the run, which exists on the first rank."""

    def callbacks(self, mesh: Mesh, loader: Loader, resumed: Checkpoint | None) -> Sequence[Callback]:
        """Return callbacks of this rank, which are called before all others, in this order."""
        return ()

    def contents(self) -> tuple[Content, ...]:
        """Return the checksums of each corpus, to store in a checkpoint."""
        return tuple(corpus.content for corpus in self.dataset.contents())


class Attachment:
    """Contribution of an attached room to a run on one rank; by default none.

    A room declares its subclass in `ATTACHMENTS` of its door. Methods are called on all ranks alike.

    Args:
        start: state that the run starts from, which the engine holds.
        kept: states of earlier attempts, whose files the room may write on.
    """

    def __init__(self, engine: Engine, loader: Loader, start: StartingPoint, kept: KeptStates | None) -> None:
        self.engine, self.loader, self.start, self.kept = engine, loader, start, kept

    def record(self) -> AnomalyFacts | None:
        """Return the record of the run's bad steps, to store in a checkpoint; None if there is nothing to remember."""
        return None

    def is_proved(self, step: int) -> bool:
        """Return whether the checkpoint of `step` updates is known to be right, so that older ones may be deleted."""
        return True

    def callbacks(self, saving: SafeSaving) -> Sequence[Callback]:
        """Return callbacks of this rank, which are called after all others, in this order."""
        return ()


_CALLED_BY_RANKS: Final = (
    *("peak_rate", "checks", "over_shared_memory", "kept_states", "remote_copies", "background_saver", "check_plan"),
    *("checkpoints", "hash_of_part", "announce", "performance_meter", "share_mailbox"),
)
"""Hooks of a run, in the order in which its ranks call them."""


def import_attachments() -> None:
    """Import what attached rooms add to a run, before processes are forked."""
    for name in _CALLED_BY_RANKS:
        hook(name)
    for path in added("ATTACHMENTS").values():
        imported(path)


def attachments(
    engine: Engine, loader: Loader, start: StartingPoint, kept: KeptStates | None = None
) -> list[Attachment]:
    """Make what each attached room adds to a run on this rank."""
    makers: list[Callable[..., Attachment]] = [imported(path) for path in added("ATTACHMENTS").values()]
    return [make(engine, loader, start, kept) for make in makers]
