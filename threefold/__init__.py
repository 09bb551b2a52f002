"""Threefold: train GPT-style language models in any data × tensor × pipeline layout, with equal results.

Everything the command line does is also available from Python under the names of this module and of its rooms
`callbacks`, `compat`, `pipeline` and `types`. They are imported on first use, so `import threefold` alone does not
import torch, which takes seconds.
"""

import sys
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold import compat as compat
    from threefold.api import callbacks as callbacks
    from threefold.api import pipeline as pipeline
    from threefold.api import types as types
    from threefold.api.checkpoint import load as load
    from threefold.api.checkpoint import save as save
    from threefold.api.inspect_model import inspect as inspect
    from threefold.api.launch import init_mesh as init_mesh
    from threefold.api.launch import notebook_launcher as notebook_launcher
    from threefold.api.launch import run as run
    from threefold.api.launch import spawn as spawn
    from threefold.api.model import parallelize as parallelize
    from threefold.api.model_optimizer import distributed_optimizer as distributed_optimizer
    from threefold.api.pipeline import PipelineLayers as PipelineLayers
    from threefold.api.prepare import clip_grad_norm_ as clip_grad_norm_
    from threefold.api.prepare import prepare as prepare
    from threefold.api.prepared_loader import gather_for_metrics as gather_for_metrics
    from threefold.api.prepared_model import backward as backward
    from threefold.api.trainer import Trainer as Trainer
    from threefold.api.trainer import verify_model as verify_model
    from threefold.comm.mesh import Mesh as Mesh
    from threefold.config import Config as Config
    from threefold.config import load_config as load_config
    from threefold.data.map_dataset import DistributedDataLoader as DistributedDataLoader
    from threefold.errors import UserError as UserError
    from threefold.launch.failure import RankFailed as RankFailed
    from threefold.models.loss_terms import CountedLoss as CountedLoss
    from threefold.models.loss_terms import LossTerm as LossTerm
    from threefold.models.plan import Plan as Plan
    from threefold.models.sharding import Column as Column
    from threefold.models.sharding import Constant as Constant
    from threefold.models.sharding import Normal as Normal
    from threefold.models.sharding import PerHead as PerHead
    from threefold.models.sharding import Replicated as Replicated
    from threefold.models.sharding import Row as Row
    from threefold.models.sharding import Sharded as Sharded
    from threefold.models.sharding import Vocab as Vocab
    from threefold.parallel.cross_entropy import ParallelCrossEntropy as ParallelCrossEntropy
    from threefold.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
    from threefold.parallel.tensor import RowParallelLinear as RowParallelLinear
    from threefold.parallel.tensor import VocabParallelEmbedding as VocabParallelEmbedding
    from threefold.random.dropout import Dropout as Dropout
    from threefold.random.dropout import sample_keys as sample_keys
    from threefold.random.rng import RandomStreams as RandomStreams
    from threefold.train.callbacks.base import Callback as Callback
    from threefold.train.stop import Stopped as Stopped

__version__ = "0.1.0"

_ROOMS: Final = {"callbacks": "api.callbacks", "compat": "compat", "pipeline": "api.pipeline", "types": "api.types"}
"""Room → its module, relative to the package."""
_NAMES: Final = {
    "api.checkpoint": "load save",
    "api.inspect_model": "inspect",
    "api.launch": "init_mesh notebook_launcher run spawn",
    "api.model": "parallelize",
    "api.model_optimizer": "distributed_optimizer",
    "api.pipeline": "PipelineLayers",
    "api.prepare": "clip_grad_norm_ prepare",
    "api.prepared_loader": "gather_for_metrics",
    "api.prepared_model": "backward",
    "api.trainer": "Trainer verify_model",
    "comm.mesh": "Mesh",
    "config": "Config load_config",
    "data.map_dataset": "DistributedDataLoader GlobalBatchSampler",
    "errors": "UserError",
    "launch.failure": "RankFailed",
    "models.loss_terms": "CountedLoss LossTerm",
    "models.plan": "Plan",
    "models.sharding": "Column Constant Normal PerHead Replicated Row Sharded Vocab",
    "parallel.cross_entropy": "ParallelCrossEntropy",
    "parallel.tensor": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "random.dropout": "Dropout sample_keys",
    "random.rng": "RandomStreams",
    "train.callbacks.base": "Callback",
    "train.stop": "Stopped",
}
"""Module, relative to the package → the public names that it defines."""
_MOVED_TO: Final = {
    "callbacks": "EvaluationRecord RunContext StepRecord",
    "compat.horovod": "DistributedOptimizer allreduce broadcast_object broadcast_optimizer_state broadcast_parameters",
    "compat.paddle": "Splitter split",
    "pipeline": "layers_by_rank partition_by_class partition_by_cost partition_uniform partition_uniform_chunks",
    "types": (
        "Axis Coordinates DistributedModel Initializer InspectedModule Inspection Layout LossFunction LossSums "
        "ModelOptimizer ModelPlan PreparedLoader PreparedModule PreparedOptimizer PreparedScheduler Split "
        "VerifiedModel"
    ),
}
"""Room → the names that the package itself had once; they keep working."""
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
_MOVED: Final = {
    **{name: f"{room}.{name}" for room, names in _MOVED_TO.items() for name in names.split()},
    "DataLoader": "DistributedDataLoader",
    "DistributedBatchSampler": "GlobalBatchSampler",
    "Shard": "Sharded",
}
"""Name that was public once → where it is now."""
__all__ = sorted([*_ROOMS, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{_ROOMS[name]}")
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _MOVED:
        return reduce(getattr, _MOVED[name].split("."), sys.modules[__name__])
    close = get_close_matches(name, [*__all__, *_MOVED], n=1)
    hint = f"; did you mean {_MOVED.get(close[0], close[0])!r}?" if close and not name.startswith("_") else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
