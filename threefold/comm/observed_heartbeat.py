"""A heartbeat that also tells an observer in its own process what the rank begins, for profiles of a run."""

from typing import Protocol

from threefold.comm.heartbeat import Activity, Heartbeat, RunSection, Wait, wait_of


class Observer(Protocol):
    """What is told of the thread that trains; a wait lies within an activity, and what lies in neither is not told."""

    def section(self, section: RunSection, step: int) -> None:
        """A part of the run begins; ends the activity before."""

    def activity(self, activity: Activity, stage: int, micro_batch: int, name: str) -> None:
        """An activity begins, of a callback with its name; ends the one before."""

    def wait(self, operation: str, axis: str) -> None:
        """A wait in a collective over an axis begins; ends the one before."""

    def resume(self) -> None:
        """The wait ends."""


class ObservedHeartbeat(Heartbeat):
    """Writes to the page of another heartbeat, in whose place it is used, and tells the observer.

    Heartbeats that nobody observes are not slowed down by it.

    Args:
        heartbeat: whose page it is.
        observer: is called in the thread that notes something.
    """

    def __init__(self, heartbeat: Heartbeat, observer: Observer) -> None:
        vars(self).update(vars(heartbeat))
        self._observer, self._waits = observer, False
        self._known: dict[int, Wait] = {}

    def section(self, section: RunSection, step: int = 0) -> None:
        super().section(section, step)
        self._observer.section(section, step)

    def activity(self, activity: Activity, stage: int = 0, micro_batch: int = 0) -> None:
        super().activity(activity, stage, micro_batch)
        name = self._names[stage] if activity is Activity.CALLBACK else ""
        self._observer.activity(activity, stage, micro_batch, name)

    def wait(self, code: int) -> None:
        super().wait(code)
        if code not in self._known:
            self._known[code] = wait_of(code, self._axes)
        self._waits = True
        self._observer.wait(self._known[code].operation, self._known[code].axis)

    def resume(self) -> None:
        super().resume()
        if self._waits:
            self._waits = False
            self._observer.resume()
