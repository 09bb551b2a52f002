"""Cases of sequence and context parallelism, the sizes of a case, and the comparison of a layout with one process."""

from tests.support.parity import Case, departures, in_layout
from threefold.planner.model_size import RankBlock
from threefold.planner.systems import Attention


def sizes(case: Case) -> RankBlock:
    short = case.sequence <= 512 and not case.documents
    attention: Attention = "plain" if case.dtype == "bf16" and short else "fused"
    if case.dropout:
        attention = "dropped" if short else "dropped again"
    itemsize = {"fp64": 8, "fp32": 4}.get(case.dtype, 2)
    return RankBlock(
        samples=case.batch // case.accumulation,
        length=case.sequence,
        hidden=case.heads * case.head_dim,
        heads=case.heads,
        key_heads=case.heads,
        head_dim=case.head_dim,
        ffn=case.ffn,
        itemsize=itemsize,
        hidden_dropout=case.dropout > 0,
        attention=attention,
        documents=case.documents,
        tp=case.tp,
        cp=case.cp,
        sequence_parallel=case.config.parallel.sequence_parallel,
    )


SHARED = (("parallel.sequence_parallel", True),)


def shared(**changes) -> Case:
    """Return a sequence-parallel case: 12 positions divide by 2, 3 and 4 ranks, the vocabulary of 67 by none."""
    return Case(**{"sequence": 12, "settings": SHARED, "layers": 2, **changes})


def case(**changes: object) -> Case:
    """Return a case of 24 positions, which are chunks of 6, 4 and 3 for cp 2, 3 and 4."""
    sizes = {"sequence": 24, "head_dim": 4, "layers": 2, "steps": 2, "batch": 12}
    return Case(**{"dtype": "fp64", "dropout": 0.2, **sizes, **changes})


def check(pool, expected, case: Case) -> None:
    found = departures(expected(case), pool.run(case.world_size, in_layout, case), case)
    assert not found, "\n".join(found[:10])
