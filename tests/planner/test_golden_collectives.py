"""The collectives of a training step (axis, operation, bytes, order) are those that were recorded once and kept."""

from tests.planner.golden_collectives import FILE, LAYOUTS, first_difference, read, record
from tests.support.sweep import sweep


@sweep("name", LAYOUTS, quick=(2, 7, 11, 14, 20), slow=slice(0, None, 2))
def test_a_step_enters_the_recorded_collectives(pool, name: str) -> None:
    case = LAYOUTS[name]
    difference = first_difference(pool.run(case.world_size, record, case), read()[name])
    assert difference is None, f"{name}: {difference}; see tests/planner/golden_collectives.py for how to record anew"


def test_the_file_holds_these_layouts_and_no_others() -> None:
    kept = read()
    assert list(kept) == list(LAYOUTS)
    assert [len(ranks) for ranks in kept.values()] == [case.world_size for case in LAYOUTS.values()]
    assert all(ranks and all(ranks) for ranks in kept.values())
    assert FILE.stat().st_size < 200_000


def test_the_first_difference_is_named() -> None:
    kept = [["tp all_reduce 8", "tp all_gather 8"], ["tp all_reduce 8"]]
    assert first_difference(kept, kept) is None
    assert first_difference(kept[:1], kept) == "1 ranks instead of 2"
    assert (
        first_difference([kept[0], ["tp all_reduce 8", "dp all_reduce 4"]], kept)
        == "rank 1, collective 1 after tp all_reduce 8: dp all_reduce 4 instead of nothing"
    )
    assert (
        first_difference([["tp all_reduce 4", "tp all_gather 8"], kept[1]], kept)
        == "rank 0, collective 0: tp all_reduce 4 instead of tp all_reduce 8"
    )
