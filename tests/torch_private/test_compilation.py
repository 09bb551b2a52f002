"""A canary for the private part of `torch.compile`: what torch has changed, in a sentence."""

import signal
import subprocess
from typing import Any

import pytest
import torch

from threefold.torch_private.runtime import keep_signals_from_compilers


def blocked_in_a_child() -> int:
    """The signals that a process started here has blocked, as a bit mask."""
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return int(mask, 16)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="the system has no signal masks")
def test_what_a_compilation_starts_gets_no_signals() -> None:
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(blocked_in_a_child())
        return graph.forward

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    ending = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    torch.compiler.reset()
    keep_signals_from_compilers()
    torch.compile(doubled, backend=backend)(torch.ones(2))
    assert found
    assert found[0] & ending == ending, "torch does not tell the begin of a compilation"
    assert not blocked_in_a_child() & ending, "torch does not tell the end of a compilation"
    torch.compiler.reset()
    torch.compile(doubled, backend=backend)(torch.ones(2))
    assert not found[1] & ending, "torch keeps the callbacks when it is reset, so that each engine adds its own"
