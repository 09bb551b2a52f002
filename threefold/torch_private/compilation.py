"""Private parts of torch that concern `torch.compile`."""

import signal
from typing import Any, Final

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a run after its step (`threefold.launch.signals`)."""


def keep_signals_from_compilers() -> None:
    """Have the programs that `torch.compile` starts get none of the signals that end a run, until `compiler.reset`.

    They are blocked in a thread while it compiles, which the threads and processes that it starts inherit. A signal
    that comes meanwhile is taken by another thread of the process, or afterwards.

    Why: a signal that ends a run may be sent to all its processes, and a C++ compiler that it ends would fail the step
    that is to be finished first. Torch tells the begin and the end of a compilation to callbacks of a module whose name
    is private. A setting of torch that gives compilers a session of their own would replace this.
    """
    from torch._dynamo.callback import on_compile_end, on_compile_start  # imports a compiler, which few runs have

    before: list[set[Any]] = []

    def begin(_: Any) -> None:
        before.append(signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING))

    def end(_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.pop())

    on_compile_start(begin)
    on_compile_end(end)


class CompileCounts:
    """What torch has compiled in this process since the object was made.

    Why: whether layers share one compilation is visible in nothing else; torch's counters are in a module whose name is
    private. A public way to ask how often a function was compiled would replace it.
    """

    def __init__(self) -> None:
        self._before = self._now()

    @property
    def graphs(self) -> int:
        """Graphs, each with its forward and backward pass."""
        return self._now()["graphs"] - self._before["graphs"]

    @property
    def breaks(self) -> int:
        """Places where a function could not be compiled whole."""
        return self._now()["breaks"] - self._before["breaks"]

    @staticmethod
    def _now() -> dict[str, int]:
        from torch._dynamo.utils import counters

        return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
