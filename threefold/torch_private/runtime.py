"""Private parts of torch that concern the threads of its operations."""

import ctypes
import os
from pathlib import Path
from typing import Final

import torch

_PAUSE_HARD = 2


def end_openmp_threads() -> bool:
    """End the threads that ran parallel operations of this thread; the next operation starts new ones.

    Returns whether it did: False where torch brings no OpenMP library that can.

    Why: a forked process has none of them and would wait for them in its first parallel operation. Torch's OpenMP
    library is a file of its package that no function names; `omp_pause_resource_all` (OpenMP 5.0, section 3.2.44) is
    its public way. A function of torch that prepares for a fork would replace this.
    """
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)
        if pause is not None:
            return int(pause(_PAUSE_HARD)) == 0
    return False


_NOTHING: Final = "99"


def quieten_kineto() -> None:
    """Have the profiler print nothing when it starts and stops.

    Why: Kineto, which torch builds in, writes a line of its own to standard error for each, of a level above that of
    errors. It has no function for that; it reads this variable when it is first used. A log level in `torch.profiler`
    would replace it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _NOTHING)
