"""Standalone parameters that are cut along a dim, and one layer for queries, keys and values: equal in every layout."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.sweep import sweep
from tests.verify.custom_cut_model import Fused
from tests.verify.support import task, verify
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.models.plan import Plan
from threefold.models.sharding import Column, Replicated, Sharded, Split, check_tensor_axis
from threefold.models.source import ObjectSource
from threefold.verify.plan_check import check_plan
from threefold.verify.verifier import EQUAL, Verification


def fused_task(*layouts: str, dtype: str = "fp64") -> Verification:
    given = config_of(
        {
            "data": {"path": "nowhere", "sequence_length": 40},
            "model": {"architecture": "own", "vocab_size": 1001},
            "train": {"global_batch_size": 64},
        }
    )
    return task(*layouts, dtype=dtype, given=given, source=ObjectSource(Fused))


@sweep(
    ("dtype", "layouts"),
    [
        ("fp64", ("tp2", "dp2·tp2 zero3", "tp2·pp2 zbv")),
        ("fp64", ("tp3", "dp2·tp2 zero1 full", "tp2·pp2 gpipe", "tp6")),
        ("fp32", ("tp2", "dp2·tp2 zero1", "tp2·pp2")),
    ],
    slow=(0,),
)
def test_layouts_are_equal(pool, tmp_path: Path, dtype: str, layouts: tuple[str, ...]) -> None:
    for result in verify(pool, fused_task(*layouts, dtype=dtype), tmp_path, *layouts):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)


def scaled(**rules: Split) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12))
    plan = Plan(["0", "1"], {"0": Column(), **rules}).build(model)
    check_plan(model, plan)
    check_tensor_axis(plan, 4)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            {"1.weight": Sharded(1)},
            r"shard has Sharded\(1\) at '1.weight', a parameter of 12, which .*; use Sharded\(0\).",
        ),
        ({"1.weight": Sharded(0, heads=5)}, "with heads=5, which must divide dim 0 of 12; use heads=4"),
        ({"1.weight": Sharded(0, heads=3)}, "tp is 4 but must divide the 3 heads of '1.weight'; use 3"),
        ({"1": Sharded(0)}, "split has Sharded at '1', a module; it is for a standalone parameter"),
        ({"1.weight": Column()}, r"shard has Column at '1.weight', which is a standalone .*; use .*, Sharded\(dim\)"),
        ({"0": Column(groups=5)}, "with groups=5, which must divide the 12 features of '0'; use groups=4"),
        ({"0": Column(heads=5, groups=3)}, "with heads=5, which must divide the 4 features"),
    ],
)
def test_wrong_rules_are_one_sentence(rules: dict[str, Split], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        scaled(**{"1.bias": Replicated(), **rules})
