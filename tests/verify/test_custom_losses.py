"""Verifying a model of the user's own with its own loss and its own batches: equal layouts pass, mistakes are found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.custom_models import CustomBatches, CustomCase, custom_case, frozen_case
from tests.support.sweep import sweep
from tests.verify.support import verify
from threefold.config import Config
from threefold.models.sharding import ModelPlan
from threefold.models.source import ModelSource
from threefold.verify.verifier import EQUAL, Verification

LAYOUTS = ("dp2·tp2", "pp2", "dp2 zero3", "pp2·dp2 zbv")


@dataclass(frozen=True)
class Made(ModelSource):
    """A source of the model of a case."""

    own: CustomCase

    def _load(self, config: Config) -> tuple[Callable[[], nn.Module], ModelPlan]:
        return self.own.make, self.own.plan

    def loss(self, config: Config) -> Callable[..., Any] | None:
        return self.own.loss

    def describe(self, config: Config) -> str:
        return str(self)

    def __str__(self) -> str:
        return "the model of a test"


def task(kind: str, dtype: str = "fp64") -> Verification:
    own = custom_case(kind, blocks=3, dtype=dtype, optimizer="adamw")
    return Verification(own.case.config, 3, CustomBatches(own.batches), Made(own))


@sweep(("kind", "dtype"), [("masked", "fp64"), ("streams", "fp64"), ("masked", "fp32")], slow=(0, 1))
def test_layouts_are_equal(pool, tmp_path: Path, kind: str, dtype: str) -> None:
    for result in verify(pool, task(kind, dtype), tmp_path, *LAYOUTS):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)


@pytest.mark.slow
def test_layouts_of_a_model_with_frozen_parameters_are_equal(pool, tmp_path: Path) -> None:
    own = frozen_case("first layers", dtype="fp64", optimizer="adamw")
    todo = Verification(own.case.config, 3, CustomBatches(own.batches), Made(own))
    for result in verify(pool, todo, tmp_path, *LAYOUTS):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)
