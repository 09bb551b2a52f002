"""Types of the public functions' arguments and results, for annotations; exported as `threefold.types`."""

from typing import Any

from threefold.api.model import DistributedModel as DistributedModel
from threefold.api.model_optimizer import ModelOptimizer as ModelOptimizer
from threefold.comm.axis import Axis as Axis
from threefold.comm.layout import Coordinates as Coordinates
from threefold.comm.layout import Layout as Layout
from threefold.doors import added, imported
from threefold.models.loss_terms import LossFunction as LossFunction
from threefold.models.loss_terms import LossSums as LossSums
from threefold.models.sharding import ModelPlan as ModelPlan
from threefold.models.sharding import Split as Split
from threefold.parallel.split_layer import Initializer as Initializer

__all__ = [name for name in dir() if not name.startswith("_")] + [*added("TYPES")]


def __getattr__(name: str) -> Any:
    if name in added("TYPES"):
        return imported(added("TYPES")[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
