"""Tests of the tests: silent mistakes in training a user's own model, put in, must make the comparison fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.mistakes import Patch, counts_of_one_replica, dropout_keyed_by_the_rows_of_a_replica, with_mistake
from tests.support.own_models import in_layout, one_process, own_case
from tests.support.parity import departures
from threefold.models.loss_terms import TermSums
from threefold.parallel.pipeline.stage import OwnBatch
from threefold.torch_private.pipelining import BufferedPipelineStage

pytestmark = pytest.mark.slow  # they test the tests


def terms_not_weighted() -> list[Patch]:
    terms = TermSums._terms

    def plain(self: TermSums, value: Any, samples: int) -> Any:
        return {name: term._replace(weight=1.0) for name, term in terms(self, value, samples).items()}

    return [(TermSums, "_terms", plain)]


def mean_of_the_last_micro_batch() -> list[Patch]:
    split = OwnBatch.split
    return [(OwnBatch, "split", lambda self, parts: [split(self, parts)[-1]] * parts)]


def gradient_of_the_first_activation_alone() -> list[Patch]:
    send = BufferedPipelineStage.get_bwd_send_ops  # what is sent, however it is sent

    def first_only(self: BufferedPipelineStage, bwd_chunk_id: int) -> list[Any]:
        first, *others = send(self, bwd_chunk_id) or [None]
        for op in others:
            op.tensor = torch.zeros_like(op.tensor)
        return [] if first is None else [first, *others]

    return [(BufferedPipelineStage, "get_bwd_send_ops", first_only)]


MISTAKES = [
    (counts_of_one_replica, "masked", {"dp": 2}, "loss"),
    (dropout_keyed_by_the_rows_of_a_replica, "masked", {"dp": 2}, "loss"),
    (terms_not_weighted, "masked", {}, "grad"),
    (mean_of_the_last_micro_batch, "streams", {"pp": 2}, "loss"),
    (gradient_of_the_first_activation_alone, "streams", {"pp": 2}, "grad"),
]


@pytest.mark.parametrize(("mistake", "kind", "layout", "sign"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_mistake_is_found(pool, mistake: Callable[[], list[Patch]], kind: str, layout: dict, sign: str) -> None:
    own = own_case(kind, blocks=2, dtype="fp64", accumulation=4, **layout)
    (expected,) = pool.run(1, one_process, own)
    found = departures(expected, pool.run(own.case.world_size, with_mistake, mistake, in_layout, own), own.case)
    assert any(sign in departure for departure in found), found[:5]
