"""`breakpoint()` in a rank that is a process of a local run: one rank may have the terminal, the others have none."""

import os
import sys
from bdb import BdbQuit
from typing import Any, NoReturn

from threefold.errors import UserError


def set_debugger(debug_rank: int | None, rank: int, named: str) -> None:
    """Give this process the terminal where its rank is `debug_rank`; else have `breakpoint()` say what to do.

    A debugger that the user has chosen stays, such as one that listens on a port.

    Args:
        named: the option that chooses the rank; empty where there is none.
    """
    if rank == debug_rank:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # which `multiprocessing` closes
        return
    if os.environ.get("PYTHONBREAKPOINT") or sys.breakpointhook is not sys.__breakpointhook__:
        return

    def refuse(*args: Any, **options: Any) -> NoReturn:
        how = f"start the run with {named} {rank}" if named else "call threefold.run with ranks=1, which starts none"
        raise UserError(f"breakpoint() is called on rank {rank}, whose process has no terminal; {how}.")

    sys.breakpointhook = refuse


def told_quit(error: BaseException, rank: int) -> BaseException:
    """Return the sentence for a debugger that was quit; any other error as it is."""
    if BdbQuit not in (type(error), type(error.__cause__)):
        return error
    return UserError(f"The debugger on rank {rank} was quit, which ends the run; type c to go on with it.")
