"""Which copy is the wrong one."""

import pytest

from threefold.resilience.corruption import Verdict, compare, explain


def two_columns(rank: int) -> int:
    """As on dp · tp 2."""
    return rank % 2


@pytest.mark.parametrize(
    ("values", "ranks", "is_certain"),
    [
        ("AAAA", (), True),
        ("AABA", (2,), True),
        ("AAAAAABA", (6,), True),
        ("AB", (0, 1), False),
        ("ABABAC", (5,), True),  # the tensor ranks have come apart by what rank 5 has wrong
        ("ABAC", (1, 3), False),  # the same with two copies of each
        ("AAAC", (3,), True),  # before it has spread
        ("ABAB", (0, 1, 2, 3), False),
        ("ABCDEF", (0, 1, 2, 3, 4, 5), False),
    ],
)
def test_verdict(values: str, ranks: tuple[int, ...], is_certain: bool) -> None:
    verdict = compare({rank: ord(value) for rank, value in enumerate(values)}, two_columns)
    if not ranks:
        assert verdict is None
        return
    assert verdict is not None
    assert (verdict.ranks, verdict.is_certain) == (ranks, is_certain)
    assert {*verdict.ranks, *verdict.others} == set(range(len(values)))


def test_a_tensor_rank_among_several_is_found_without_replicas() -> None:
    verdict = compare({rank: ord(value) for rank, value in enumerate("AABA")}, lambda rank: rank)
    assert verdict == Verdict((2,), True, (0, 1, 3))


def test_hosts_are_named_where_there_are_several() -> None:
    copies = {"head.weight": Verdict((1,), True, (0, 2))}
    one = explain(4, 4, {}, copies, ["a", "a", "a"], None)
    assert "rank 1 has other bits in head.weight than ranks 0 and 2" in str(one)
    assert str(one).endswith("there is no checkpoint to resume from.")
    assert "rank 1 (b)" in str(explain(4, 4, {}, copies, ["a", "b", "a"], None))


def test_what_changed_at_rest_is_named_before_the_copies_that_differ_by_it() -> None:
    copies = {name: Verdict((0, 1), False, ()) for name in "abcde"}
    error = explain(4, 5, {1: ["d"]}, copies, ["x", "x"], None)
    assert error.ranks == (1,)
    assert str(error).startswith("On rank 1 d changed before the update of step 5")
    error = explain(4, 5, {}, copies, ["x", "x"], None)
    assert error.ranks == (0, 1)
    assert "different bits in a, b, c and 2 more tensors" in str(error)


def test_without_a_majority_the_tensor_with_the_fewest_suspects_is_named() -> None:
    """The others may differ by what it gave them."""
    copies = {"a": Verdict((0, 1, 2, 3), False, ()), "b": Verdict((2, 3), False, (0, 1))}
    error = explain(4, 5, {}, copies, ["x"] * 4, None)
    assert error.ranks == (2, 3)
    assert "ranks 2 and 3 have different bits in b, of which" in str(error)
