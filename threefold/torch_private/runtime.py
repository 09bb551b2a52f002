"""Private parts of torch for the threads of its operations and the output of its profiler."""

import ctypes
import os
from pathlib import Path
from typing import Final

import torch

_PAUSE_HARD = 2


def end_openmp_threads() -> bool:
    """End the threads that ran parallel operations of this thread; return False if torch's OpenMP library cannot.

    Why: a forked process has none of these threads and would wait for them in its first parallel operation. Torch's
    OpenMP library is a file in its package that no function names; `omp_pause_resource_all` (OpenMP 5.0, section
    3.2.44) is the library's public function. A function of torch that prepares for a fork would replace this.
    """
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)
        if pause is not None:
            return int(pause(_PAUSE_HARD)) == 0
    return False


_NOTHING: Final = "99"


def quieten_kineto() -> None:
    """Keep the profiler from printing when it starts and stops.

    Why: Kineto, which is part of torch, then writes a line to standard error, at a level above that of errors. It has
    no function to change this; it reads this variable when first used. A log level in `torch.profiler` would replace
    it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _NOTHING)
