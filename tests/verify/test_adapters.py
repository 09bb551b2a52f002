"""What verifying sees of adapters: their updates, their dropout, and both exports of a run that has them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.mistakes import Patch
from tests.support.sweep import sweep
from tests.verify.support import MistakenPool, config, task, verify
from threefold.adapters.layers import AdaptedRow
from threefold.adapters.merging import Factors
from threefold.config import Config
from threefold.huggingface import peft_format
from threefold.random.dropout import Dropout
from threefold.verify.rank_worker import EXPORT, MIXED
from threefold.verify.verifier import DEPARTS, EQUAL

LLAMA = {"architecture": "llama", "num_layers": 2, "num_key_value_heads": 4}
MOE = {**LLAMA, "num_experts": 4, "experts_per_token": 2}


def given(model: dict[str, Any], **adapter: Any) -> Config:
    return config(model={"tie_embeddings": False, **model}, adapter={"rank": 3, "alpha": 7.0, **adapter})


def merged_without_its_factor() -> list[Patch]:
    def plain(self: Factors, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return weight + self.adapter.spread(b) @ a

    return [(Factors, "merged", plain)]


def not_merged() -> list[Patch]:
    return [(Factors, "merged", lambda self, weight, a, b: weight)]


def projections_swapped_for_peft() -> list[Patch]:
    parts = peft_format._parts_in

    def swapped(factors: Factors, layer: peft_format.Layer, *rest: Any) -> list[int]:
        found = parts(factors, layer, *rest)
        return [2 - each for each in found] if layer.path.endswith(("q_proj", "v_proj")) else found

    return [(peft_format, "_parts_in", swapped)]


def the_factor_of_one_part_is_lost() -> list[Patch]:
    def output(self: AdaptedRow, x: Tensor) -> Tensor:
        out: Tensor = super(AdaptedRow, self).partial_sum(x)  # type: ignore[misc]
        return out + self.adapter.output(x, *self.factors()) * (1 + 0.1 * self.axis.index)  # type: ignore[operator]

    return [(AdaptedRow, "partial_sum", output)]


def each_rank_drops_as_the_first() -> list[Patch]:
    of_part = Dropout.of_part

    def same(self: Dropout, parts: Any) -> Dropout:
        return self if self.name.endswith("lora_dropout") else of_part(self, parts)

    return [(Dropout, "of_part", same)]


MISTAKES = [
    (the_factor_of_one_part_is_lost, "tp2", "", "gradient"),
    (each_rank_drops_as_the_first, "cp2", MIXED, "gradient"),
    (merged_without_its_factor, "tp2", EXPORT, "exported weight"),
    (not_merged, "tp2", EXPORT, "exported weight"),
    (projections_swapped_for_peft, "tp2", EXPORT, "exported weight"),
]


@sweep(("mistake", "layout", "check", "what"), MISTAKES, ids=[each[0].__name__ for each in MISTAKES], quick=(4,))
def test_a_mistake_is_found(pool, tmp_path: Path, mistake, layout: str, check: str, what: str) -> None:
    [result] = verify(MistakenPool(pool, mistake), task(layout, given=given(LLAMA)), tmp_path, layout)
    assert result.verdict == DEPARTS, result.message
    assert result.first is not None
    assert (result.first.check, result.first.what) == (check, what)


CASES = {
    "gpt": ({}, {}, "dp2·tp2"),
    "llama": (LLAMA, {}, "tp2·pp2"),
    "all layers": (LLAMA, {"targets": ["**"]}, "dp2·tp2"),
    "magnitudes": (LLAMA, {"dora": True, "targets": ["blocks.**", "head.output"]}, "dp2·tp2"),
    "experts": (MOE, {}, "dp2·ep2"),
}


@sweep("which", CASES, quick=(1,))
def test_a_run_with_adapters_is_equal(pool, tmp_path: Path, which: str) -> None:
    model, adapter, layout = CASES[which]
    todo = task(layout, given=given(model, **adapter))
    [result] = verify(pool, todo, tmp_path, layout)
    assert result.verdict == EQUAL, (result.first, result.message)
    checks = result.to_json()["checks"]
    assert all(0 < relative <= todo.tolerance for relative in checks.values()), checks
    assert todo.second is not None
    assert todo.second.config.adapter.dropout == (0.1 if which in ("gpt", "llama") else 0)
    assert any(name.endswith("lora_b") for name in result.to_json()["worst_by_parameter"])
