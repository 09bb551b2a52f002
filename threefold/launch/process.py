"""What any process of a run needs to know about processes."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends, whatever ends it (on Linux).

    Args:
        parent: process id of the parent, read before forking: it may have died since.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    """`SIGKILL` and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
