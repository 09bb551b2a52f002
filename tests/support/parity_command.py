"""`threefold parity` as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path


def parity(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command in a folder; commands of the arguments find this Python first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "threefold", "parity", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
