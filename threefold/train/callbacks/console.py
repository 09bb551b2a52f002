"""What callbacks print on the console of the reporting rank."""

import sys
from contextlib import suppress

from threefold.errors import OutputLost


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def say(line: str) -> None:
    """Print a line at once; a console that is closed or full does not end the run."""
    with suppress(OSError, OutputLost):
        print(line, flush=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
