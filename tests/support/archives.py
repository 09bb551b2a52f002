"""Runs that earlier versions wrote, as archives."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "checkpoint" / "data"

VERSION_1 = _FOLDER / "version1.tar.xz"
"""A run of two steps on tp 2, its tokens, and the losses of the unbroken run of four."""
