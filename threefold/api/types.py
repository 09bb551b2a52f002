"""Types of what the public functions take and return, for annotations; exported as `threefold.types`."""

from threefold.api.inspect_model import InspectedModule, Inspection
from threefold.api.model import DistributedModel
from threefold.api.optimizer import ModelOptimizer
from threefold.api.prepared.loader import PreparedLoader
from threefold.api.prepared.module import PreparedModule
from threefold.api.prepared.optimizer import PreparedOptimizer, PreparedScheduler
from threefold.api.verification import VerifiedModel
from threefold.comm.axis import Axis
from threefold.comm.layout import Coordinates, Layout
from threefold.models.loss_terms import LossFunction, LossSums
from threefold.models.sharding import ModelPlan, Split
from threefold.parallel.tensor import Initializer

__all__ = [
    "Axis",
    "Coordinates",
    "DistributedModel",
    "Initializer",
    "InspectedModule",
    "Inspection",
    "Layout",
    "LossFunction",
    "LossSums",
    "ModelOptimizer",
    "ModelPlan",
    "PreparedLoader",
    "PreparedModule",
    "PreparedOptimizer",
    "PreparedScheduler",
    "Split",
    "VerifiedModel",
]
