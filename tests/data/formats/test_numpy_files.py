"""Arrays of objects, which are pickles, are refused unread."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from threefold.data.formats.paddlefleetx import read_npy, read_npz
from threefold.errors import UserError


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def test_an_array_of_objects_runs_nothing(tmp_path: Path) -> None:
    values = np.array([Evil(tmp_path / "written")], dtype=object)
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    np.savez(tmp_path / "stored.npz", lens=values)
    np.savez_compressed(tmp_path / "packed.npz", lens=values)
    with pytest.raises(UserError, match=r"a.npy cannot be read: it holds object and not whole numbers"):
        read_npy(tmp_path / "a.npy")
    for name in ("stored.npz", "packed.npz"):
        with pytest.raises(UserError, match=f"{name} cannot be read: it holds object and not whole numbers"):
            read_npz(tmp_path / name, ("lens",))
    assert not (tmp_path / "written").exists()
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert (tmp_path / "written").exists()  # the attack is one
