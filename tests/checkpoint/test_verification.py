"""`threefold checkpoint verify`: one flipped bit anywhere is found, and its file and tensor are named."""

import random
from pathlib import Path

import pytest

from tests.support.command import Command, Silent
from tests.support.damage import flip
from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.index import read_index
from threefold.report.checkpoints import verify_checkpoint


def test_a_whole_run(threefold: Command, saved: Path) -> None:
    ended = threefold("checkpoint", "verify", saved)
    assert (ended.status, ended.error) == (0, "")
    lines = [line for line in ended.output.splitlines() if "is as it was written" in line]
    assert ["step_00000002" in lines[0], "step_00000004" in lines[1]] == [True, True]


def test_a_flipped_bit_of_a_tensor(threefold: Command, run: Path) -> None:
    folder = run / "checkpoints" / "step_00000002"
    name, tensor = max(read_index(folder).items(), key=lambda item: item[1].chunks[0].bytes)
    chunk = tensor.chunks[0]
    flip(folder / chunk.file, 8 * (chunk.position + chunk.bytes // 2))
    ended = threefold("checkpoint", "verify", run)
    assert ended.status == 1
    assert ended.error == (
        f"Error: The checkpoint {folder} cannot be used: its {chunk.file} does not have the checksum that it was "
        f"written with, in the tensor {name}.\n"
    )
    assert "step_00000004 is as it was written" in ended.output
    assert threefold("checkpoint", "verify", folder.with_name("step_00000004")).status == 0


def test_a_flipped_bit_in_any_file(run: Path) -> None:
    folder = run / "checkpoints" / "step_00000004"
    chance = random.Random(0)
    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        flip(path, chance.randrange(8 * len(before)))
        with pytest.raises(DamagedCheckpoint) as caught:
            verify_checkpoint(folder, Silent())
        assert path.name in str(caught.value) or path.name == "checkpoint.json"
        path.write_bytes(before)
    assert verify_checkpoint(folder, Silent()).files == len(list(folder.iterdir()))
