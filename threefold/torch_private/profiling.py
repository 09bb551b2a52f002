"""Private parts of torch's profiler: why each is used, and what would replace it."""

import os
from typing import Final

_NOTHING: Final = "99"


def quieten_kineto() -> None:
    """Have the profiler print nothing when it starts and stops.

    Why: Kineto, which torch builds in, writes a line of its own to standard error for each, of a level above that of
    errors. It has no function for that; it reads this variable when it is first used. A log level in `torch.profiler`
    would replace it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _NOTHING)
