"""Own loops whose ranks pass different arguments, or run with other variables, end with one sentence on every rank."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import threefold as t3
from tests.support.sentences import sentence
from threefold.verify.worker_pool import WorkerPool


class Model(nn.Module):
    plan = t3.Plan(layers=["embed", "head"])

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def parallelized(arguments: list[dict[str, Any]]) -> str:
    return sentence(t3.parallelize, Model, mesh=t3.init_mesh(), **arguments[dist.get_rank()])


def prepared(arguments: list[dict[str, Any]]) -> str:
    mine = dict(arguments[dist.get_rank()])
    return sentence(t3.prepare, nn.Linear(3, mine.pop("width", 4)), **mine)


def with_variable() -> str:
    if dist.get_rank() == 1:
        os.environ["MKL_CBWR"] = "AVX2"
    try:
        return sentence(t3.init_mesh)
    finally:
        os.environ.pop("MKL_CBWR", None)


@pytest.mark.parametrize(
    ("function", "other", "begins"),
    [
        (parallelized, {"seed": 1}, "seed of parallelize is 0 on rank 0 ("),
        (parallelized, {"dtype": torch.float64}, "dtype of parallelize is torch.float32 on rank 0 ("),
        (parallelized, {"plan": t3.Plan(layers=["head", "embed"])}, "plan of parallelize is None on rank 0 ("),
        (prepared, {"accumulate": 2}, "accumulate of prepare is 1 on rank 0 ("),
        (prepared, {"width": 5}, "the model of prepare is {'weight': ((4, 3), torch.float32, True)"),
    ],
)
def test_other_arguments_on_one_rank(pool: WorkerPool, function: Any, other: dict[str, Any], begins: str) -> None:
    assert pool.run(2, function, [{}, {}]) == ["", ""]
    first, second = pool.run(2, function, [{}, other])
    assert first == second
    assert first.startswith(begins)
    assert first.endswith("; call it with the same arguments and the same code on every rank.")


def test_another_variable_on_one_rank(pool: WorkerPool) -> None:
    first, second = pool.run(2, with_variable)
    assert first == second
    assert first.startswith("the environment variable MKL_CBWR is not set on rank 0 (")
