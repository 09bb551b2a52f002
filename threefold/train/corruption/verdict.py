"""Which of several copies is the wrong one."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Which ranks' copies are wrong.

    Attributes:
        ranks: the wrong ones where `is_certain`, else those of which one is wrong, in ascending order.
        is_certain: whether a majority decided.
        others: further ranks with a copy.
    """

    ranks: tuple[int, ...]
    is_certain: bool
    others: tuple[int, ...]


def compare(hashes: Mapping[int, int], column: Callable[[int], Hashable]) -> Verdict | None:
    """Find the wrong copies of one tensor.

    Ranks of a column get one gradient, summed over them, so a copy of theirs that went wrong stays the only one. Ranks
    of other columns, such as tensor-parallel ranks that hold a weight whole, compute their gradients from activations
    that may have gone wrong with it: a whole column may differ from the others when one of its ranks is at fault. So
    a column that has come apart is judged by itself first.

    Args:
        hashes: of the tensor by rank.
        column: by rank, equal for ranks whose gradients are summed.

    Returns:
        None where all are equal.
    """
    if len(set(hashes.values())) <= 1:
        return None
    columns: dict[Hashable, dict[int, int]] = {}
    for rank, value in hashes.items():
        columns.setdefault(column(rank), {})[rank] = value
    apart = [ranks for ranks in columns.values() if len(set(ranks.values())) > 1]
    everywhere = _majority(hashes.values())
    suspects: set[int] = set()
    wrong: set[int] = set()
    for ranks in apart or [dict(hashes)]:
        right = _majority(ranks.values())
        if right is None and everywhere in ranks.values():
            right = everywhere
        found = {rank for rank, value in ranks.items() if value != right}
        (suspects if right is None else wrong).update(found)
    named = tuple(sorted(wrong or suspects))
    return Verdict(named, bool(wrong), tuple(sorted(hashes.keys() - set(named))))


def _majority(values: Iterable[int]) -> int | None:
    """The value of more than half of them."""
    counts = Counter(values)
    value, count = counts.most_common(1)[0]
    return value if 2 * count > counts.total() else None
