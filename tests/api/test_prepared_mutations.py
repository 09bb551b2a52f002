"""Mistakes put into prepared training on purpose: the comparison with one process finds each."""

from typing import Any

import pytest
import torch

from tests.api.prepared_scripts import Script, Updates, plain, prepared, worst
from tests.support.sweep import sweep
from threefold.api.prepare import GlobalBatchNorm
from threefold.api.prepared_loader import CurrentBatch
from threefold.api.prepared_model import GradSync
from threefold.comm.differentiable import reduce_from

UNEVEN = Script("conv", "adamw", "float64", epochs=1)
ONE_ROW = Script("conv", "sgd", "float64", rows=9, batch=4, epochs=1)

_publish = GradSync._publish


MISTAKES: dict[str, tuple[Script, type, str, Any]] = {
    "rows are not counted": (UNEVEN, GradSync, "_weight_of", lambda *_: torch.ones((), dtype=torch.float64)),
    "an unused weight decays": (
        UNEVEN,
        GradSync,
        "_publish",
        lambda self, has_gradient: _publish(self, [True] * len(has_gradient)),
    ),
    "gradients of other replicas' statistics are lost": (
        UNEVEN,
        GlobalBatchNorm,
        "_over_replicas",
        lambda self, x: reduce_from(x, self.axis),
    ),
    "a filler is in the statistics": (ONE_ROW, CurrentBatch, "is_filler", property(lambda self: False)),
}


def with_mistake(name: str) -> Updates:
    script, owner, attribute, mistake = MISTAKES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, mistake)
        return prepared(script)


@sweep("name", list(MISTAKES), quick=[0])
def test_a_mistake_is_found(pool, name: str) -> None:
    script = MISTAKES[name][0]
    expected = pool.run(1, plain, script)[0]
    assert worst(pool.run(4, prepared, script)[0], expected) < 1e-10
    assert worst(pool.run(4, with_mistake, name)[0], expected) > 1e-4
