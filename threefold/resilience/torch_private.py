"""Private part of torch that the watch for hangs uses, with the reason why, and with what would replace it."""

import torch


def nccl_records() -> bytes | None:
    """Return the records of NCCL's flight recorder, in the format of its tools; None if torch has no NCCL.

    Why: the rank that hangs is not the one whose watchdog writes them, and a run that is ended before NCCL's own
    timeout would have none. A public function would replace it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump())
