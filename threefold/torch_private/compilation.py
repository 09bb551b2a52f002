"""Private parts of torch that concern `torch.compile`."""

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_kept_from_compilers(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Within the block, the programs that `torch.compile` starts from this thread get none of these signals.

    They are blocked in the thread while it compiles, which the threads and processes that it starts inherit. A signal
    that comes meanwhile is taken by another thread of the process, or afterwards.

    Why: a signal that ends a run may be sent to all its processes, and a C++ compiler that it ends would fail the step
    that is to be finished first. `torch._dynamo.callback` can register callbacks for the begin and the end of a
    compilation, and has no public way to remove them. A setting of torch for a session of their own would replace this.
    """
    from torch._dynamo.callback import callback_handler  # imports a compiler, which few runs have

    before: list[set[Any]] = []

    def begin(_: Any) -> None:
        before.append(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))

    def end(_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
