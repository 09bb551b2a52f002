"""What a rank writes on its page is what others read."""

import pytest
import torch

from threefold.comm.axis import Axis, EventRecorder
from threefold.comm.heartbeat import OPERATIONS, Activity, RunSection, wait_code
from threefold.resilience.heartbeat import PAGE_BYTES, PageHeartbeat, Wait
from threefold.resilience.rank_state import RankState, WatchedHeartbeat, ask, read


def test_the_place_of_a_rank_in_words() -> None:
    heartbeat = PageHeartbeat()
    assert str(read(heartbeat.content())) == "before its start-up"
    heartbeat.section(RunSection.STEP, 7)
    heartbeat.activity(Activity.FORWARD, stage=1, micro_batch=300)
    assert str(read(heartbeat.content())) == "in the forward pass of micro-batch 300 in stage 1 in step 7"
    heartbeat.callback("Summary")
    heartbeat.callback("DataCheck")
    assert str(read(heartbeat.content())) == "in the callback DataCheck in step 7"
    heartbeat.section(RunSection.SAVE, 7)
    assert str(read(heartbeat.content())) == "in the save after step 7"


@pytest.mark.parametrize("ranks", [(0, 1), (3, 7, 11), (5,), (0, 1, 4, 5), (7, 3), tuple(range(100_000))])
def test_the_ranks_of_an_axis(ranks: tuple[int, ...]) -> None:
    heartbeat = PageHeartbeat()
    code = wait_code("gather", heartbeat.axis("dp", ranks))
    heartbeat.wait(code)
    assert read(heartbeat.content()).wait == Wait("gather", "dp", ranks)
    heartbeat.resume()
    assert read(heartbeat.content()).wait is None


def test_more_axes_than_a_page_has_room_for() -> None:
    heartbeat = PageHeartbeat()
    numbers = [heartbeat.axis(f"axis {number}", range(number, number + 8)) for number in range(400)]
    assert len(heartbeat.content()) <= PAGE_BYTES
    for operation in OPERATIONS:
        heartbeat.wait(wait_code(operation, numbers[3]))
        assert read(heartbeat.content()).wait == Wait(operation, "axis 3", tuple(range(3, 11)))
        heartbeat.wait(wait_code(operation, numbers[-1]))
        assert read(heartbeat.content()).wait == Wait(operation, "an axis", None)


def test_a_page_of_another_process_memory() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    heartbeat = WatchedHeartbeat(page)
    heartbeat.identify("this one")
    heartbeat.beat()
    state = read(page)
    assert (state.process, state.beats, state.answered, heartbeat.is_asked) == ("this one", 1, False, False)
    ask(page)
    assert heartbeat.is_asked
    heartbeat.answer()
    assert read(page).answered
    assert not heartbeat.is_asked


def test_work_within_a_wait() -> None:
    """As a checkpoint is written within the collective call of torch, and a mesh makes groups within another."""
    heartbeat = PageHeartbeat()
    outer, inner = (
        wait_code("gather", heartbeat.axis("world", range(4))),
        wait_code("send", heartbeat.axis("pp", (0, 2))),
    )
    with heartbeat.waiting(outer):
        with heartbeat.working():
            assert read(heartbeat.content()).wait is None
            before = read(heartbeat.content()).progress
            heartbeat.progress()
            assert read(heartbeat.content()).progress == before + 1
        with heartbeat.waiting(inner):
            assert str(read(heartbeat.content()).wait) == "send over pp"
        assert str(read(heartbeat.content()).wait) == "gather over world"
    assert read(heartbeat.content()).wait is None
    with heartbeat.working():
        pass
    assert read(heartbeat.content()).wait is None


def test_every_step_is_progress_and_ends_a_wait() -> None:
    heartbeat = PageHeartbeat()
    seen = [read(heartbeat.content()).progress]
    heartbeat.wait(wait_code("barrier", heartbeat.axis("world", (0, 1))))
    for go_on in (
        heartbeat.resume,
        lambda: heartbeat.section(RunSection.STEP, 1),
        lambda: heartbeat.activity(Activity.DATA),
    ):
        seen.append(read(heartbeat.content()).progress)
        go_on()
        assert read(heartbeat.content()).wait is None
        heartbeat.wait(wait_code("barrier", 0))
    assert seen == sorted(set(seen))
    assert isinstance(read(heartbeat.content()), RankState)


def test_a_collective_that_fails_is_no_wait_any_more() -> None:
    heartbeat = PageHeartbeat()
    axis = Axis("tp", (0, 1), 0, None, EventRecorder(), heartbeat=heartbeat)
    with pytest.raises(ValueError, match="does not divide"):
        axis.reduce_scatter(torch.ones(3), 0)
    assert read(heartbeat.content()).wait is None
    assert read(heartbeat.content()).progress == 2
