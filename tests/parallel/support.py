"""Cases of sequence and context parallelism, the sizes of a case, and sums of narrow gradients."""

import torch
from torch import Tensor, nn

from tests.support.parity import Case
from threefold.comm.axis import Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.dtypes import DTYPES
from threefold.parallel.compression import NarrowSum
from threefold.parallel.gradients import GradientBuckets
from threefold.planner.rank_block import RankBlock
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


def part(rank: int, size: float) -> Tensor:
    """Return one replica's bucket: numbers of either sign over nine powers of ten below `size`."""
    generator = torch.Generator().manual_seed(rank)
    magnitude = 10 ** (torch.rand(1001, generator=generator) * 9 - 9)
    return magnitude * torch.randn(1001, generator=generator) * size


def narrow_sums(name: str, sizes: list[float]) -> tuple[list[Tensor], list[Event]]:
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    found = []
    with mesh.recorder.recording() as events:
        for size in sizes:
            flat = part(mesh.rank, size)
            NarrowSum(flat, mesh.dp, DTYPES[name]).finish()
            found.append(flat)
    return found, list(events)


def narrow_sum() -> Tensor:
    """Sum many small bf16 gradients; a sum in bf16 would stop growing."""
    mesh = Mesh(Layout())
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    buckets = GradientBuckets([weight], mesh.dp, torch.float32)
    buckets.begin(1000)
    for _ in range(1000):
        (weight * 1.0).sum().backward()
    buckets.finish()
    return buckets[weight].clone()
