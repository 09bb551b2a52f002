"""S53: a sequence spread over ranks trains as a whole one does, with RoPE, learned positions and packed documents."""

import pytest

from tests.parallel.test_parity import check
from tests.support.parity import Case

SIZES = {"sequence": 24, "head_dim": 4, "layers": 2, "steps": 2, "batch": 12}
"""24 positions are chunks of 6, 4 and 3 for cp 2, 3 and 4."""


def case(**changes: object) -> Case:
    return Case(**{"dtype": "fp64", "dropout": 0.2, **SIZES, **changes})


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("documents", [False, True], ids=["packed", "separate"])
def test_cp(pool, expected, cp: int, positions: str, documents: bool) -> None:
    check(pool, expected, case(cp=cp, positions=positions, documents=documents))
