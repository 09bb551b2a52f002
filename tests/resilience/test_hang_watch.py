"""Which rank is taken to hang, from where all ranks are; by a clock that the tests move."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from threefold.comm.heartbeat import Activity, RunSection
from threefold.resilience import hang_watch
from threefold.resilience.hang_watch import Hang, HangWatch, LostStore, Stopwatch
from threefold.resilience.heartbeat import Wait
from threefold.resilience.processes import ProcessState
from threefold.resilience.rank_state import RankState

TIMEOUT = 10.0
ALL = (0, 1, 2, 3)
IN_STEP = RankState(section=RunSection.STEP, step=7)
FORWARD = replace(IN_STEP, activity=Activity.FORWARD, stage=1, micro_batch=3)
WAITING = replace(FORWARD, wait=Wait("all_reduce", "dp", ALL))


class Ranks:
    """Ranks whose threads beat, and a watch that looks at them every second."""

    def __init__(self, *places: RankState | None, state: Callable[[int], ProcessState] | None = None) -> None:
        self.places = list(places)
        self.state = dict.fromkeys(range(len(places)), ProcessState.RUNNING)
        self.computing: set[int] = set()
        self.silent: set[int] = set()
        self.ended: set[int] = set()
        self.watch = HangWatch(len(places), TIMEOUT, lambda rank: self.state[rank])

    def after(self, seconds: int, *progressing: int, step: float = 1.0) -> Hang | None:
        """Look again and again; `progressing` ranks make some progress between two looks."""
        for _ in range(int(seconds / step)):
            for rank, place in enumerate(self.places):
                if place is not None:
                    beats, progress = place.beats + (rank not in self.silent), place.progress + (rank in progressing)
                    worked = place.worked + step * (rank in self.computing)
                    self.places[rank] = replace(place, beats=beats, progress=progress, worked=worked)
            if hang := self.watch.observe(self.places, step, self.ended):
                return hang
        return None

    def hang(self, seconds: int) -> Hang:
        """Look again and again until there is a hang."""
        found = self.after(seconds)
        assert found is not None
        return found


def test_a_rank_that_hangs_in_python() -> None:
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    assert ranks.after(10) is None  # the first look is at no time passed
    hang = ranks.after(1)
    assert hang == Hang(
        (0,),
        "it has not answered for 10 s (train.timeout): it is in the forward pass of micro-batch 3 in stage 1 in step "
        "7, and ranks 1, 2 and 3 wait for it in all_reduce over dp",
    )


def test_a_rank_that_goes_on_may_take_its_time() -> None:
    """A long save, a long evaluation of one rank: others wait for hours."""
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    assert ranks.after(1000, 0) is None
    assert ranks.after(9) is None
    assert ranks.after(3) is not None


def test_ranks_that_do_the_same_for_long() -> None:
    """A compilation in the first step takes longer than the timeout; the last to finish has not hung."""
    ranks = Ranks(FORWARD, FORWARD, FORWARD, FORWARD)
    assert ranks.after(300) is None
    ranks.places[1:] = [replace(WAITING, beats=400, progress=5)] * 3
    assert ranks.after(9) is None
    ranks.places[0] = replace(WAITING, beats=500, progress=5)
    assert ranks.after(9) is None


def test_work_before_the_last_progress_does_not_count() -> None:
    """A rank that computed for long, made progress and now hangs has the time of one that waits."""
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    ranks.computing = {0}
    assert ranks.after(30) is None
    ranks.computing = set()
    assert ranks.after(1, 0) is None
    assert ranks.after(9) is None
    assert ranks.after(2) is not None


def test_silence_begins_anew_with_each_beat() -> None:
    """A rank that was silent twice for less than half of the timeout runs."""
    ranks = Ranks(WAITING, WAITING, WAITING, WAITING)
    for silent in ({1}, set(), {1}):
        ranks.silent = silent
        assert ranks.after(3 if silent else 1) is None
    ranks.silent = set()
    assert ranks.hang(10).ranks == ALL


def test_the_rank_that_stopped_first_is_to_blame() -> None:
    ranks = Ranks(FORWARD, WAITING, FORWARD, WAITING)
    assert ranks.after(3, 0, 1, 3) is None
    assert ranks.after(2, 1, 3) is None
    assert ranks.after(9, 1, 3) is None
    assert ranks.hang(12).ranks == (2, 0)


def test_time_in_which_the_launcher_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now[0])
    stopwatch = Stopwatch(0.25)
    found = []
    for later in (0.3, 600.0, 0.5):
        now[0] += later
        found.append(stopwatch.passed())
    assert found == pytest.approx([0.3, 1.0, 0.5])


def test_a_stopped_process_that_waits() -> None:
    ranks = Ranks(WAITING, WAITING, WAITING, WAITING)
    ranks.silent, ranks.state[2] = {2}, ProcessState.STOPPED
    hang = ranks.hang(12)
    assert hang.ranks == (2,)
    assert (
        "its process is stopped, as by SIGSTOP, in the forward pass of micro-batch 3 in stage 1 in step 7" in hang.error
    )
    assert "(all_reduce over dp), and ranks 0, 1 and 3 wait for it in all_reduce over dp" in hang.error


def test_a_process_of_another_host_that_does_not_run() -> None:
    ranks = Ranks(WAITING, WAITING, WAITING, WAITING)
    ranks.silent = {1, 3}
    hang = ranks.hang(12)
    assert hang.ranks == (1, 3)
    assert "as rank 3 does not either: its process does not run, in the forward" in hang.error


def test_the_stopped_rank_comes_before_one_that_has_waited_unseen() -> None:
    """As in a collective of a user's own, which no heartbeat knows of."""
    ranks = Ranks(FORWARD, WAITING, FORWARD, WAITING)
    ranks.state[2] = ProcessState.STOPPED
    assert ranks.hang(12).ranks == (2, 0)


def test_who_waits_is_who_waits_for_that_rank() -> None:
    pair = Wait("all_reduce", "tp", (0, 1))
    ranks = Ranks(FORWARD, replace(WAITING, wait=pair), WAITING, replace(WAITING, wait=Wait("send", "pp", (0, 3))))
    ranks.places[2] = replace(WAITING, wait=Wait("all_reduce", "dp", (1, 2)))
    hang = ranks.hang(12)
    assert hang.error.endswith("and rank 1 waits for it in all_reduce over tp, 1 more in other collectives")
    ranks = Ranks(FORWARD, replace(WAITING, wait=Wait("all_reduce", "dp", (1, 2))), ranks.places[2])
    hang = ranks.hang(12)
    assert hang.error.endswith("and ranks 1 and 2 wait in all_reduce over dp")


def test_all_wait_for_all() -> None:
    barrier = replace(WAITING, activity=Activity.CALLBACK, name="Mine", wait=Wait("barrier", "world", ALL))
    ranks = Ranks(barrier, WAITING, WAITING, WAITING)
    assert ranks.after(10) is None
    assert ranks.after(1) == Hang(
        ALL,
        "it has waited for 10 s (train.timeout) in barrier over world in the callback Mine in step 7, ranks 1, 2 and 3 "
        "in all_reduce over dp in the forward pass of micro-batch 3 in stage 1 in step 7, so that all wait for all",
    )


@pytest.mark.parametrize("over", ["ended", "at its end"])
def test_a_rank_that_is_done_does_not_hang(over: str) -> None:
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    if over == "ended":
        ranks.ended = {0}
    else:
        ranks.places[0] = replace(FORWARD, section=RunSection.END)
    assert ranks.after(9) is None
    ranks.places[1] = replace(WAITING, progress=9)
    assert ranks.after(9, 1) is None


def test_a_rank_that_computes_has_longer() -> None:
    """A compilation, or a long evaluation in a callback, of one rank alone."""
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    ranks.computing = {0, 1}  # of the second a thread beside the one that waits
    assert ranks.after(39) is None
    hang = ranks.hang(2)
    assert hang.ranks == (0,)
    assert hang.error.startswith("it has not answered for 40 s (train.timeout): it is in the forward pass of micro-")
    assert "in stage 1 in step 7, where it computes, and ranks 1, 2 and 3 wait for it in " in hang.error


def test_a_rank_that_has_ceased_to_compute() -> None:
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    ranks.computing = {0}
    assert ranks.after(12) is None
    ranks.computing = set()
    hang = ranks.hang(10)
    assert "it has not answered for 10 s (train.timeout): it is in the forward pass" in hang.error


def test_a_stopped_rank_that_has_computed_has_no_longer() -> None:
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    ranks.computing = {0}
    assert ranks.after(10) is None
    ranks.state[0] = ProcessState.STOPPED
    hang = ranks.hang(1)
    assert "it has not answered for 10 s (train.timeout): its process is stopped, as by SIGSTOP, in the" in hang.error


def test_native_code_that_lets_no_other_thread_run() -> None:
    """No beat comes from such a rank, but the system says that it works."""
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    ranks.silent, ranks.computing = {0}, {0}
    assert ranks.after(39) is None
    hang = ranks.hang(2)
    assert "it is in the forward pass" in hang.error


def test_a_stopped_rank_that_others_wait_for_unseen() -> None:
    """As in collectives of a user's own, on all the other ranks."""
    ranks = Ranks(FORWARD, FORWARD, FORWARD)
    ranks.state[1] = ProcessState.STOPPED
    hang = ranks.hang(12)
    assert hang.ranks == (1,)
    assert hang.error.endswith("in stage 1 in step 7, and ranks 0 and 2 make no progress either")
    ranks = Ranks(FORWARD, FORWARD, FORWARD)
    ranks.state[1] = ProcessState.STOPPED
    assert ranks.after(1000, 2) is None  # somebody goes on
    ranks.state = dict.fromkeys(range(3), ProcessState.STOPPED)
    assert ranks.after(1000) is None  # somebody stopped the whole run


def test_nobody_waits() -> None:
    assert Ranks(FORWARD, FORWARD).after(1000) is None


def test_a_debugger_stops_the_clock() -> None:
    ranks = Ranks(FORWARD, WAITING, WAITING, WAITING)
    ranks.state[3] = ProcessState.TRACED
    assert ranks.after(1000) is None
    ranks.state[3] = ProcessState.RUNNING
    assert ranks.after(4) is None
    assert ranks.after(7) is not None


def test_a_rank_that_has_not_come_yet_may_prepare_its_data() -> None:
    ranks = Ranks(None, WAITING, WAITING, WAITING)
    assert ranks.after(39) is None
    hang = ranks.hang(2)
    assert hang.error == (
        "it has not answered for 40 s (train.timeout): it has not met the other ranks, and ranks 1, 2 and 3 wait for "
        "it in all_reduce over dp"
    )


def test_many_ranks_are_counted() -> None:
    everyone = Wait("all_reduce", "world", tuple(range(64)))
    ranks = Ranks(FORWARD, *[replace(WAITING, wait=everyone)] * 63)
    hang = ranks.hang(12)
    assert hang.error.endswith("ranks 1, 2, 3, 4 and 59 more wait for it in all_reduce over world")


def test_a_store_that_does_not_answer() -> None:
    lost = LostStore(3, TIMEOUT)
    waiting = [lost.observe(replace(WAITING, beats=time), 5, 1.0) for time in range(12)]
    assert waiting[:10] == [""] * 10
    assert waiting[-1] == (
        "its host has not answered for 10 s (train.timeout): the launcher's store there is out of reach, and rank 3 "
        "waits in all_reduce over dp in the forward pass of micro-batch 3 in stage 1 in step 7"
    )


def test_a_store_that_answers_or_is_not_needed() -> None:
    lost = LostStore(3, TIMEOUT)
    assert not any(lost.observe(WAITING, exchanges, 1.0) for exchanges in range(40))
    lost = LostStore(3, TIMEOUT)
    assert not any(lost.observe(replace(FORWARD, progress=time), 5, 1.0) for time in range(40))
