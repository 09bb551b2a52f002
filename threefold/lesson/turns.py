"""Turns of ranks that are threads of one process: one runs at a time, until it waits for others or ends."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from threefold.random.rng import generator_states, restore_generators


class Abandoned(BaseException):
    """End of a rank after another one has failed; no `Exception`, as nothing is to handle it."""


@dataclass(frozen=True)
class _Wait:
    ready: Callable[[], bool]
    what: str


class Turns:
    """Order in which the ranks run, the same each time.

    A rank runs until it waits for what is not ready; then the next one whose wait is over goes on. Each rank has its
    own state of the process's generators of random numbers, as it would in a process of its own.

    Raises a RuntimeError, on a rank that waits, if all of them wait for each other.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._waits: dict[int, _Wait] = {rank: _Wait(lambda: True, "its first turn") for rank in range(size)}
        self._turn: int | None = 0
        self._error: BaseException | None = None
        self._generators: dict[int, Any] = dict.fromkeys(range(size), generator_states())

    def run(self, work: Callable[[int], None], here: int) -> None:
        """Run `work` with each rank, that of rank `here` in this thread; raise the first error of a rank."""
        others = [rank for rank in range(self.size) if rank != here]
        threads = [
            threading.Thread(target=self._work, args=(work, rank), name=f"rank {rank}", daemon=True) for rank in others
        ]
        for thread in threads:
            thread.start()
        self._work(work, here)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready`, which depends on what they do; `what` names the wait."""
        if ready():
            return
        self._generators[rank] = generator_states()
        with self._changed:
            self._waits[rank] = _Wait(ready, what)
            self._pass_on(rank)
            self._take(rank)

    def _work(self, work: Callable[[int], None], rank: int) -> None:
        try:
            with self._changed:
                self._take(rank)
            work(rank)
            with self._changed:
                self._pass_on(rank)
        except Abandoned:
            return
        except BaseException as error:  # `run` raises it
            self._fail(error)

    def _take(self, rank: int) -> None:
        """Sleep until it is the rank's turn."""
        while self._turn != rank and self._error is None:
            self._changed.wait()
        if self._error is not None:
            raise Abandoned
        del self._waits[rank]
        restore_generators(self._generators[rank])

    def _pass_on(self, rank: int) -> None:
        order = [(rank + 1 + number) % self.size for number in range(self.size)]
        self._turn = next((each for each in order if each in self._waits and self._waits[each].ready()), None)
        if self._turn is None and self._waits:
            told = "; ".join(f"rank {each} for {wait.what}" for each, wait in sorted(self._waits.items()))
            raise RuntimeError(f"No rank can go on, as each waits for others: {told}.")
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
