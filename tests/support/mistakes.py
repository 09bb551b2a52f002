"""Patches that reintroduce silent mistakes of training systems; a comment at each says where it hides."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from threefold.comm import differentiable as collectives
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch
from threefold.parallel import parameter
from threefold.parallel.pipeline import stage
from threefold.train import optim, step_batch
from threefold.train import step as engine

Patch = tuple[Any, str, Any]
"""Arguments of `patch.object`."""


def with_mistake(mistake: Callable[[], list[Patch]], call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` with a mistake, as a rank of the pool, which a test cannot patch."""
    with patched(mistake()):
        return call(*args)


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(patch.object(*each))
        yield


def column_input_gradient_not_summed() -> list[Patch]:
    return [(collectives._CopyTo, "backward", staticmethod(lambda ctx, grad: (grad, None)))]


def shards_seeded_alike() -> list[Patch]:
    return [(parameter, "offset", lambda weight: (0,) * weight.dim())]


def mean_of_means() -> list[Patch]:
    def count(self: step_batch.BatchPreparation, batch: Batch) -> tuple[int, int, int]:
        valid = int((batch.labels != IGNORE_INDEX).sum()) * self.mesh.dp.size
        return valid, 0, valid

    return [(step_batch.BatchPreparation, "_count", count)]


def tied_weight_counted_twice_in_the_norm() -> list[Patch]:
    return [(stage.TiedWeights, "is_primary", lambda self, name: True)]


def logged_loss_of_one_replica() -> list[Patch]:
    both = engine.Engine._loss_and_norm

    def local(self: engine.Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        _, norm, terms = both(self, local_loss)
        return local_loss.item() * self.mesh.dp.size, norm, terms

    return [(engine.Engine, "_loss_and_norm", local)]


def biases_decayed() -> list[Patch]:
    return [(optim.Entry, "decays", True)]
