"""Every feature together with every other computes what one process computes, in pairwise arrays of layouts.

The other files have the layouts that something particular is known to depend on.
"""

from dataclasses import replace

import pytest

from tests.support.layouts import AXES, goes_together, in_words, laid_out
from tests.support.pairwise import Row, every_value, pairwise
from tests.support.parity import LLAMA, MOE, Case, check

GPT = Case(layers=4, head_dim=4, sequence=24, batch=24, dropout=0.1, steps=2)
FAMILIES = {
    "gpt": GPT,
    "gpt-rope": replace(GPT, positions="rope", tie=False, documents=True),
    "llama": replace(LLAMA, sequence=24, layers=4),
    "mixture": replace(MOE, sequence=24, layers=4),
}
ALL_AXES = {
    "family": tuple(FAMILIES),
    "dtype": ("fp64", "fp32"),
    "optimizer": ("adamw", "sgd", "muon"),
    "micro": (1, 2, 3, 4),
    "chunk": (0, 5),
    **AXES,
    "dp": (1, 2, 3, 4),
    "tp": (1, 2, 3, 4),
    "pp": (1, 2, 3),
    "cp": (1, 2),
    "method": ("", "ring"),
}


def is_valid(row: Row) -> bool:
    """Return whether the settings go together."""
    has_heads = row["tp"] < 4 or row["family"].startswith("gpt")  # six heads of keys and values in the others
    return has_heads and goes_together(row, GPT.batch, row["micro"]) and (row["cp"] > 1 or not row["method"])


ROWS = pairwise(ALL_AXES, is_valid)
SLOW = every_value(ROWS)
QUICK = SLOW[:2]


def marked(place: int) -> object:
    """Return a row as parameters of a test: two are quick, and some with every value are slow."""
    row = ROWS[place]
    marks = [] if place in QUICK else [pytest.mark.slow] if place in SLOW else [pytest.mark.sweep]
    words = in_words(row)
    named = f"{row['family']} {row['dtype']} {row['optimizer']}: {words}"
    return pytest.param(row["family"], row["dtype"], row["optimizer"], words, id=named, marks=marks)


@pytest.mark.parametrize(("family", "dtype", "optimizer", "words"), [marked(place) for place in range(len(ROWS))])
def test_a_layout_computes_what_one_process_does(
    pool, expected, family: str, dtype: str, optimizer: str, words: str
) -> None:
    check(pool, expected, laid_out(replace(FAMILIES[family], dtype=dtype, optimizer=optimizer), words))
