"""Which ranks are slow, from how long each has waited."""

from threefold.resilience.stragglers import find_stragglers


def test_the_rank_that_waits_least_is_slow() -> None:
    (slow,) = find_stragglers([5.0, 5.2, 0.5, 5.1], 10.0, [range(4)])
    assert (slow.rank, round(slow.factor, 2)) == (2, 1.94)
    assert str(slow) == (
        "rank 2 computes 1.9 times as long as the median of the ranks with the same work, and waits 5% of the time, "
        "the median one 51%"
    )


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    (slow,) = find_stragglers([6.0, 1.0], 10.0, [range(2)])
    assert slow.rank == 1


def test_stages_have_work_of_their_own() -> None:
    waited = [8.0, 8.0, 1.0, 1.0]  # the second stage has more work, or the better half of a bubble
    assert find_stragglers(waited, 10.0, [[0, 1], [2, 3]]) == []
    assert [each.rank for each in find_stragglers(waited, 10.0, [[0], [1], [2], [3]])] == [2, 3]


def test_equal_ranks_and_small_differences() -> None:
    assert find_stragglers([5.0, 5.0, 4.0], 10.0, [range(3)]) == []
    assert find_stragglers([0.06, 0.01], 0.1, [range(2)], least=0.1) == []
    assert find_stragglers([1.0, 1.0], 0.0, [range(2)]) == []


def test_what_others_lose_to_the_slowest_is_not_named() -> None:
    """As on cores that several ranks share: of another stage one loses a little, too."""
    waited = [7.0, 1.0, 6.0, 7.0]
    assert [each.rank for each in find_stragglers(waited, 10.0, [[0, 2], [1, 3]])] == [1]


def test_what_is_not_compared_makes_no_rank_slow() -> None:
    assert find_stragglers([1.0, 5.0], 10.0, [range(2)], aside=[4.0, 0.0]) == []
