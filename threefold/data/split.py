"""Train, validation and test splits: which documents belong to which.

Documents are assigned to the splits by a keyed permutation of their numbers, so that a held-out split represents the
whole corpus even if its files are about different things. The key is fixed: a corpus has one validation split per
`data.split`, whatever the run's seed, and runs can be compared on it.
"""

import math
from typing import Final

import numpy as np

from threefold.errors import UserError
from threefold.random.permutation import Int64Array, KeyedPermutation

SPLITS: Final = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Weights of train, valid and test from "949,50,1"; missing ones are 0.

    Raises:
        UserError: not one to three numbers ≥ 0 with the first above 0.
    """
    fields = [field.strip() for field in text.split(",")]
    try:
        weights = [float(field) for field in fields]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= w < math.inf for w in weights) or weights[0] == 0:
        raise UserError(
            f'data.split is "{text}" but must be weights of train, valid and test, none negative and train above 0, '
            'such as "949,50,1"'
        )
    train, valid, test = (*weights, 0.0, 0.0)[:3]
    return train, valid, test


def document_counts(documents: int, split: str) -> dict[str, int]:
    """How many of `documents` each split gets: by largest remainder, and at least 1 where the weight is above 0.

    Raises:
        UserError: fewer documents than splits with a weight.
    """
    weights = np.array(parse_split(split))
    wanted = int(np.count_nonzero(weights))
    if documents < wanted:
        nearest = ",".join(f"{w:g}" if i < documents else "0" for i, w in enumerate(weights))
        unevaluated = " and train.eval_every to 0" if documents < 2 and weights[1] else ""
        raise UserError(
            f'data.split "{split}" needs at least {wanted} documents and the data holds {documents}; '
            f'prepare more documents, or set data.split to "{nearest}"{unevaluated}'
        )
    exact = weights / weights.sum() * documents
    counts = np.floor(exact).astype(np.int64)
    remainders = np.argsort(counts - exact, kind="stable")
    counts[remainders[: documents - counts.sum()]] += 1
    for empty in np.flatnonzero((counts == 0) & (weights > 0)):
        counts[np.argmax(counts)] -= 1
        counts[empty] = 1
    return dict(zip(SPLITS, counts.tolist(), strict=True))


def document_runs(documents: int, split: str, name: str) -> Int64Array:
    """The documents of split `name`, in file order, as runs of neighbours.

    Returns:
        int64 [runs, 2]: first document of a run and the one after its last. No rows if the split is empty.
    """
    counts = document_counts(documents, split)
    largest = max(counts, key=lambda key: counts[key])
    if name != largest:
        return _runs(_assigned(documents, counts, name))
    # The largest split is what the others leave, so that millions of its documents need no permuting.
    others = np.concatenate([_assigned(documents, counts, other) for other in SPLITS if other != largest])
    others.sort()
    firsts, ends = np.append(0, others + 1), np.append(others, documents)
    return np.stack([firsts, ends], axis=1)[firsts < ends]


def _assigned(documents: int, counts: dict[str, int], name: str) -> Int64Array:
    before = sum(counts[other] for other in SPLITS[: SPLITS.index(name)])
    places = np.arange(before, before + counts[name], dtype=np.int64)
    return np.sort(KeyedPermutation(documents, seed=0, purpose="split")(places))


def _runs(members: Int64Array) -> Int64Array:
    is_first = np.diff(members, prepend=-2) != 1
    is_last = np.diff(members, append=-2) != 1
    return np.stack([members[is_first], members[is_last] + 1], axis=1)
