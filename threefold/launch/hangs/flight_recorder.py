"""Torch's flight recorder: what NCCL was doing on each rank when the run was ended because a rank did not answer.

Only ranks on GPUs have one. The files of all ranks are compared by
`python -m torch.distributed.flight_recorder.fr_trace RUN/logs -p flight_recorder_`.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from threefold.launch.output import log_file
from threefold.output.links import replace_link

_COLLECTIVES: Final = 2000
"""The newest ones, which are kept."""


def keep_records(run_dir: Path | None) -> None:
    """Have NCCL keep a record of its collectives; call before the process group is initialised.

    Only environment variables set this.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_COLLECTIVES))
    if run_dir is not None:  # where NCCL writes by itself, when its own timeout is over
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(_prefix(run_dir)))


def write_records(run_dir: Path | None, rank: int) -> None:
    """Write this rank's record to RUN/logs, where there are a record and a folder."""
    from threefold.torch_private.distributed import nccl_records

    records = nccl_records() if run_dir is not None else None
    if run_dir is None or records is None:
        return
    with suppress(OSError):
        replace_link(Path(f"{_prefix(run_dir)}{rank}")).write_bytes(records)


def _prefix(run_dir: Path) -> Path:
    return log_file(run_dir, 0).parent / "flight_recorder_"
