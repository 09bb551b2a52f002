"""Which failures are followed by another attempt, and in which layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, record
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.errors import HardwareFault, UserError
from threefold.launch.failure import RankFailed, from_exception, from_exit_code
from threefold.report.door import GOODPUT_FILE
from threefold.report.goodput import GoodputLedger
from threefold.resilience.restarts import Restarts, fallbacks_of
from threefold.train.attempt import Attempt

KILLED = -9


def arguments(config: Config, attempt: Attempt) -> tuple[Any, ...]:
    return config, attempt


def restarts_of(run: Run, run_dir: Path, most: int, *fallbacks: str) -> Restarts:
    config = run.but(set=(("train.max_restarts", most), ("parallel.fallbacks", list(fallbacks) or None))).config
    return Restarts(config, run_dir, fallbacks_of(config), 0.0, arguments)


def reach(run_dir: Path, step: int) -> None:
    """An attempt has made `step`."""
    ledger = GoodputLedger(run_dir / GOODPUT_FILE, Attempt(number=1))
    ledger.before_fit(step - 1)
    ledger.before_step(step, None)
    ledger.after_step(record(step))
    ledger.close()


def test_as_often_as_the_setting_says(small_run: Run, tmp_path: Path) -> None:
    again = restarts_of(small_run.but(dp=2), tmp_path, 2)
    assert again.args()[1].number == 0
    for number in (1, 2):
        reach(tmp_path, number)
        following = again(from_exit_code(1, KILLED))
        assert following is not None
        assert following[1] == 2
        assert (following[0][1].number, following[0][1].most) == (number, 2)
        assert following[0][1].failure.startswith("rank 1 failed: its process was killed by SIGKILL")
    reach(tmp_path, 3)
    with pytest.raises(RankFailed) as raised:
        again(from_exit_code(0, 1))
    log = tmp_path / "logs" / "rank_00000.log"
    assert str(raised.value) == (
        f"rank 0 failed: its process ended with exit status 1 (log: {log}); given up, as the ranks were restarted 2 "
        "times (train.max_restarts 2)"
    )


def test_none_by_default_and_none_after_a_mistake_of_the_user(small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0 failed: ValueError: no \(log: .*rank_00000.log\)$"):
        restarts_of(small_run, tmp_path, 0)(from_exception(0, ValueError("no")))
    with pytest.raises(UserError, match=r"^data.path is nowhere.$"):
        restarts_of(small_run, tmp_path, 5)(from_exception(0, UserError("data.path is nowhere.")))


def test_after_a_hardware_fault_nothing_in_memory_is_trusted(small_run: Run, tmp_path: Path) -> None:
    config = small_run.but(dp=2, set=(("train.max_restarts", 2), ("checkpoint.memory_every", 1))).config
    again = Restarts(config, tmp_path, {}, 0.0, arguments)
    before = again.args()[1].memory
    ((file, _), _) = before
    file.write_bytes(b"x" * 100)
    kept = again(from_exit_code(0, KILLED))
    assert kept is not None
    assert kept[0][1].memory == before
    assert file.stat().st_size == 100
    following = again(from_exception(0, HardwareFault("rank 0 has another weight than rank 1.", (0,), 3)))
    assert following is not None
    assert [path.stat().st_size for each in following[0][1].memory for path in each] == [0] * 4


def test_the_same_step_failing_in_the_same_way_is_no_chance(small_run: Run, tmp_path: Path) -> None:
    again = restarts_of(small_run.but(dp=2), tmp_path, 9)
    reach(tmp_path, 4)
    again(from_exception(1, OSError("port 4711 is in use")))
    again(from_exception(0, OSError("port 4711 is in use")))  # another rank
    again(from_exception(0, ValueError("port 4711 is in use")))  # in another way
    reach(tmp_path, 5)
    again(from_exception(0, ValueError("port 4711 is in use")))  # in another step
    with pytest.raises(RankFailed, match=r"; given up, as step 6 failed in the same way twice in a row with no other"):
        again(from_exception(0, ValueError("port 4712 is in use")))


def test_a_rank_that_is_lost_twice_has_a_smaller_layout_take_over(small_run: Run, tmp_path: Path) -> None:
    again = restarts_of(small_run.but(dp=2, tp=2), tmp_path, 9, "dp8", "tp2", "dp1")
    lost = from_exit_code(3, KILLED)
    worlds = []
    for step in (1, 2, 3, 4):
        reach(tmp_path, step)
        following = again(lost if step < 3 else from_exit_code(1, KILLED))
        assert following is not None
        config, attempt = following[0]
        worlds.append((following[1], config.parallel.dp, config.parallel.tp, attempt.layout))
        assert config.train.global_batch_size == 8
    assert worlds == [(4, 2, 2, ""), (2, 1, 2, "tp2"), (2, 1, 2, "tp2"), (1, 1, 1, "dp1")]


def test_a_failure_in_another_layout_is_not_the_second_of_its_kind(small_run: Run, tmp_path: Path) -> None:
    """The smaller layout has its own two tries, also where its rank of the same number fails as before."""
    again = restarts_of(small_run.but(dp=2, tp=2), tmp_path, 9, "dp1")
    reach(tmp_path, 1)
    worlds = []
    for _ in range(3):
        following = again(from_exit_code(0, KILLED))
        assert following is not None
        worlds.append(following[1])
    assert worlds == [4, 1, 1]
    with pytest.raises(RankFailed, match=r"given up, as step 2 failed in the same way twice in a row"):
        again(from_exit_code(0, KILLED))


def test_a_run_that_was_complete_is_not_repeated(small_run: Run, tmp_path: Path, pool) -> None:
    from tests.train.support import train_rank

    pool.run(1, train_rank, small_run, tmp_path)
    assert restarts_of(small_run, tmp_path, 1)(from_exit_code(0, KILLED)) is None


def test_fallbacks_keep_the_global_batch(small_run: Run) -> None:
    given = (
        ("parallel.fallbacks", ["dp2·pp2 zero1", "dp1 recompute=full"]),
        ("train.global_batch_size", None),
        ("train.micro_batch_size", 2),
        ("train.gradient_accumulation_steps", 4),
        ("parallel.sequence_parallel", True),
    )
    sections = small_run.but(dp=2, tp=2, set=given).config.given()
    found = [*fallbacks_of(Config.model_validate(sections)).values()]
    assert [Layout.from_config(each.parallel).world_size for each in found] == [4, 1]
    assert {each.train.global_batch_size for each in found} == {16}
    assert {each.train.micro_batch_size for each in found} == {2}
    assert (found[0].parallel.zero, found[0].parallel.sequence_parallel) == (1, False)
    assert found[1].train.recompute == "full"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "dp3",
            "parallel.fallbacks has dp3, with which this run cannot go on: train.global_batch_size is 8 but must be",
        ),
        ("zbv", "parallel.fallbacks has zbv, with which this run cannot go on: The layout 'zbv' names no axis; write"),
        ("tp3", "parallel.fallbacks has tp3, with which this run cannot go on: parallel.tp is 3 but"),
        ("dp2 zer1", "cannot go on: The layout 'dp2 zer1' has 'zer1', which is neither an axis"),
    ],
)
def test_a_fallback_that_cannot_be_used_is_one_sentence(small_run: Run, text: str, error: str) -> None:
    with pytest.raises(UserError) as raised:
        fallbacks_of(small_run.but(set=(("parallel.fallbacks", [text]),)).config)
    assert error in str(raised.value)
    assert str(raised.value).count("\n") == 0
