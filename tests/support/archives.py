"""Archives of runs that earlier versions wrote."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "checkpoint" / "data"

VERSION_1 = _FOLDER / "version1.tar.xz"
"""Run of two steps on tp 2, with its tokens and the losses of an unbroken run of four steps."""
