"""What ranks tell each other over the store while they set their memory up, and who else reaches it."""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from threefold.cpu import segments as shared_memory_setup
from threefold.cpu.segments import Room, StoreExchange
from threefold.cpu.shared_memory import SharedMemoryGroup, over_shared_memory
from threefold.verify.worker_pool import WorkerError

NOBODY = 65534


def told_and_voted(against: tuple[int, ...]) -> tuple[str, bool, bool]:
    """What rank 1 tells; whether all agree on what the ranks `against` refuse; and on the same in a later exchange."""
    first, second = StoreExchange(dist.group.WORLD), StoreExchange(dist.group.WORLD)
    rank = dist.get_rank()
    assert (first.ranks, first.index) == ([0, 1, 2], rank)
    for exchange, text in ((first, "früher"), (second, "later")):
        if rank == 1:
            exchange.tell("word", text)
    first.vote("ready", rank not in against)
    second.vote("ready", True)
    assert second.told("word") == "later"
    return first.told("word"), first.agreed("ready"), second.agreed("ready")


def test_ranks_are_told_and_agree(pool) -> None:
    assert pool.run(3, told_and_voted, ()) == [("früher", True, True)] * 3


def test_one_vote_against_is_enough(pool) -> None:
    assert pool.run(3, told_and_voted, (1,)) == [("früher", False, True)] * 3
    assert pool.run(3, told_and_voted, (0, 1, 2)) == [("früher", False, True)] * 3


def set_up(change: Callable[[Path], Path]) -> bool:
    """Whether the ranks share memory whose folder has been changed between its making and its use."""
    before, folders = shared_memory_setup._make_folder, list[Path]()

    def make(room: Room, size: int, cleaning: ExitStack) -> Path | None:
        made = before(room, size, cleaning)
        assert made is not None
        folders.append(change(made))
        return folders[-1]

    shared_memory_setup._make_folder = make
    try:
        (group,) = over_shared_memory([dist.group.WORLD], 4096)
    finally:
        shared_memory_setup._make_folder = before
    if isinstance(group, SharedMemoryGroup):
        assert not any(folder.exists() for folder in folders), "it is removed once all have opened it"
        group.close()
    return isinstance(group, SharedMemoryGroup)


def as_it_is(folder: Path) -> Path:
    return folder


def open_to_others(folder: Path) -> Path:
    folder.chmod(0o755)
    return folder


def of_another_user(folder: Path) -> Path:
    os.chown(folder, NOBODY, NOBODY)
    return folder


def behind_a_link(folder: Path) -> Path:
    link = folder.with_name(f"{folder.name}-link")
    link.symlink_to(folder)
    return link


def tried_by_another_user(folder: Path) -> Path:
    """Fails where a process of another user gets at anything in the folder."""
    child = os.fork()
    if not child:
        reached = 0
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempts: list[Callable[[], object]] = [lambda: os.listdir(folder)]
            attempts += [lambda name=name: os.open(folder / name, os.O_RDWR) for name in ("memory", "barrier-0")]
            attempts += [lambda: os.listdir(f"/proc/{os.getppid()}/fd")]
            for attempt in attempts:
                try:
                    attempt()
                    reached += 1
                except PermissionError:
                    continue
        except BaseException:
            reached = 99
        os._exit(reached)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return folder


def test_memory_is_shared_in_a_folder_of_this_user_alone(pool) -> None:
    """Another user of the host can reach the store that names the folder, and what is in the memory is unpickled."""
    try:
        assert pool.run(2, set_up, as_it_is) == [True, True]
        assert pool.run(2, set_up, open_to_others) == [False, False]
        assert pool.run(2, set_up, behind_a_link) == [False, False]
    finally:
        for left in Path("/dev/shm").glob("threefold-*-link"):
            shutil.rmtree(left.resolve(), ignore_errors=True)
            left.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_reaches_no_memory_and_cannot_put_his_own_in_its_place(pool) -> None:
    assert pool.run(2, set_up, tried_by_another_user) == [True, True]
    assert pool.run(2, set_up, of_another_user) == [False, False]


def killed_while_set_up(moment: str, told: str) -> None:
    """Rank 0 kills itself when it has made the folder, or when all have opened what is in it."""
    make, agreed = shared_memory_setup._make_folder, StoreExchange.agreed

    def make_and_die(room: Room, size: int, cleaning: ExitStack) -> Path | None:
        made = make(room, size, cleaning)
        Path(told).write_text(str(made))
        if moment == "made":
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    def agree_and_die(exchange: StoreExchange, name: str) -> bool:
        if name == "local" and exchange.index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return agreed(exchange, name)

    shared_memory_setup._make_folder, StoreExchange.agreed = make_and_die, agree_and_die  # type: ignore[method-assign]
    over_shared_memory([dist.group.WORLD], 1 << 20)


@pytest.mark.parametrize("moment", ["made", "opened"])
def test_the_next_set_up_deletes_the_folder_of_a_killed_one(moment: str, pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        pool.run(2, killed_while_set_up, moment, str(tmp_path / "told"))
    folder = Path((tmp_path / "told").read_text())
    # Nothing large is left once all have opened it; before that, another test's set-up may be deleting it right now.
    assert moment == "made" or not (folder / "memory").exists()
    assert pool.run(2, set_up, as_it_is) == [True, True]
    assert not folder.exists()
