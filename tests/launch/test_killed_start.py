"""Runs whose launcher or rank is killed while the ranks set up their shared memory leave none of it for long."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.runs import children, command, start_ready, write_config
from tests.support import ready

BEGINS = "/dev/shm/threefold-"


def folder_of(ranks: list[int]) -> Path | None:
    """The folder that one of the processes is using to set up shared memory."""
    for rank in ranks:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{rank}/fd"):
                place = os.readlink(f"/proc/{rank}/fd/{descriptor}")
                if place.startswith(BEGINS) and place.count("/") == 3 and "deleted" not in place:
                    return Path(place)
    return None


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_the_next_run_deletes_what_killed_ones_have_left(victim: str, tmp_path: Path, tokens: Path) -> None:
    config, delays, seen = write_config(tmp_path, tokens), random.Random(0), list[Path]()
    for number in range(8):
        process = start_ready(command(config, tmp_path / f"run{number}", "--set", "parallel.dp=2"))
        found = None
        while found is None and process.poll() is None:
            with suppress(OSError):
                found = folder_of(children(process.pid))
        if found is not None:
            seen.append(found)
            time.sleep(delays.random() * 0.003)  # any moment of the set-up
        if process.poll() is None:
            with suppress(OSError, IndexError):
                os.kill(process.pid if victim == "launcher" else children(process.pid)[0], 9)
        process.communicate()
    assert seen, "no run was killed in its set-up"
    ended = ready.run(command(config, tmp_path / "last", "--set", "parallel.dp=2"))
    assert ended.returncode == 0, ended.stderr
    assert [folder for folder in seen if folder.exists()] == []
