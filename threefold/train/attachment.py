"""Contributions of attached rooms to a run on its ranks (`threefold.doors`)."""

from collections.abc import Callable, Sequence

import torch

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.comm.heartbeat import Heartbeat
from threefold.data.loader import Loader
from threefold.doors import added, hook, imported
from threefold.train.callbacks.base import Callback
from threefold.train.saving import SafeSaving
from threefold.train.state import HeldStates, StartingPoint
from threefold.train.step import Engine


class Profiler(Callback):
    """Callback that profiles some steps, whose parts the heartbeat of its rank tells it."""

    def observing(self, heartbeat: Heartbeat, device: torch.device) -> Heartbeat:
        """Return a heartbeat to use in place of the given one, which tells this profiler what the rank does, too."""
        raise NotImplementedError


class Attachment:
    """Contribution of an attached room to a run on one rank; by default none.

    A room declares its subclass in `ATTACHMENTS` of its door. Methods are called on all ranks alike.

    Args:
        start: state that the run starts from, which the engine holds.
        held: states of earlier attempts, whose files the room may write on.
    """

    def __init__(self, engine: Engine, loader: Loader, start: StartingPoint, held: HeldStates | None) -> None:
        self.engine, self.loader, self.start, self.held = engine, loader, start, held

    def record(self) -> AnomalyFacts | None:
        """Return the record of the run's bad steps, to store in a checkpoint; None if there is nothing to remember."""
        return None

    def is_proved(self, step: int) -> bool:
        """Return whether the checkpoint of `step` updates is known to be right, so that older ones may be deleted."""
        return True

    def callbacks(self, saving: SafeSaving) -> Sequence[Callback]:
        """Return callbacks of this rank, which are called after all others, in this order."""
        return ()


def import_attachments() -> None:
    """Import what attached rooms add to a run, before processes are forked."""
    for name in ("held_states", "remote_copies"):
        hook(name)
    for path in added("ATTACHMENTS").values():
        imported(path)


def attachments(
    engine: Engine, loader: Loader, start: StartingPoint, held: HeldStates | None = None
) -> list[Attachment]:
    """Make what each attached room adds to a run on this rank."""
    makers: list[Callable[..., Attachment]] = [imported(path) for path in added("ATTACHMENTS").values()]
    return [make(engine, loader, start, held) for make in makers]
