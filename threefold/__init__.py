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
    from threefold import compat
    from threefold.api import callbacks, pipeline, types
    from threefold.api.checkpoint import load, save
    from threefold.api.inspect_model import inspect
    from threefold.api.launch import notebook_launcher, run, spawn
    from threefold.api.mesh import init_mesh
    from threefold.api.model import parallelize
    from threefold.api.optimizer import distributed_optimizer
    from threefold.api.pipeline import PipelineLayers
    from threefold.api.prepared.grad_sync import backward
    from threefold.api.prepared.loader import gather_for_metrics
    from threefold.api.prepared.prepare import clip_grad_norm_, prepare
    from threefold.api.trainer import Trainer
    from threefold.api.verification import verify_model
    from threefold.comm.mesh import Mesh
    from threefold.config import Config, load_config
    from threefold.data.map_dataset import DistributedDataLoader
    from threefold.errors import UserError
    from threefold.launch.failure import RankFailed
    from threefold.models.loss_terms import CountedLoss, LossTerm
    from threefold.models.plan import Plan
    from threefold.models.sharding import Column, Constant, Normal, PerHead, Replicated, Row, Sharded, Vocab
    from threefold.parallel.tensor import (
        ColumnParallelLinear,
        ParallelCrossEntropy,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    from threefold.random.dropout import Dropout, sample_keys
    from threefold.random.rng import RandomStreams
    from threefold.train.callbacks.base import Callback
    from threefold.train.stop import Stopped

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Column",
    "ColumnParallelLinear",
    "Config",
    "Constant",
    "CountedLoss",
    "DistributedDataLoader",
    "Dropout",
    "LossTerm",
    "Mesh",
    "Normal",
    "ParallelCrossEntropy",
    "PerHead",
    "PipelineLayers",
    "Plan",
    "RandomStreams",
    "RankFailed",
    "Replicated",
    "Row",
    "RowParallelLinear",
    "Sharded",
    "Stopped",
    "Trainer",
    "UserError",
    "Vocab",
    "VocabParallelEmbedding",
    "backward",
    "callbacks",
    "clip_grad_norm_",
    "compat",
    "distributed_optimizer",
    "gather_for_metrics",
    "init_mesh",
    "inspect",
    "load",
    "load_config",
    "notebook_launcher",
    "parallelize",
    "pipeline",
    "prepare",
    "run",
    "sample_keys",
    "save",
    "spawn",
    "types",
    "verify_model",
]

_ROOMS: Final = {"callbacks": "api.callbacks", "compat": "compat", "pipeline": "api.pipeline", "types": "api.types"}
"""Room → its module, relative to the package."""

_MODULES: Final = {
    "Callback": "train.callbacks.base",
    "Column": "models.sharding",
    "ColumnParallelLinear": "parallel.tensor",
    "Config": "config",
    "Constant": "models.sharding",
    "CountedLoss": "models.loss_terms",
    "DistributedDataLoader": "data.map_dataset",
    "Dropout": "random.dropout",
    "LossTerm": "models.loss_terms",
    "Mesh": "comm.mesh",
    "Normal": "models.sharding",
    "ParallelCrossEntropy": "parallel.tensor",
    "PerHead": "models.sharding",
    "PipelineLayers": "api.pipeline",
    "Plan": "models.plan",
    "RandomStreams": "random.rng",
    "RankFailed": "launch.failure",
    "Replicated": "models.sharding",
    "Row": "models.sharding",
    "RowParallelLinear": "parallel.tensor",
    "Sharded": "models.sharding",
    "Stopped": "train.stop",
    "Trainer": "api.trainer",
    "UserError": "errors",
    "Vocab": "models.sharding",
    "VocabParallelEmbedding": "parallel.tensor",
    "backward": "api.prepared.grad_sync",
    "clip_grad_norm_": "api.prepared.prepare",
    "distributed_optimizer": "api.optimizer",
    "gather_for_metrics": "api.prepared.loader",
    "init_mesh": "api.mesh",
    "inspect": "api.inspect_model",
    "load": "api.checkpoint",
    "load_config": "config",
    "notebook_launcher": "api.launch",
    "parallelize": "api.model",
    "prepare": "api.prepared.prepare",
    "run": "api.launch",
    "sample_keys": "random.dropout",
    "save": "api.checkpoint",
    "spawn": "api.launch",
    "verify_model": "api.verification",
}
"""Public name → the module that defines it, relative to the package."""

_MOVED: Final = {
    "Axis": "types.Axis",
    "Coordinates": "types.Coordinates",
    "DataLoader": "DistributedDataLoader",
    "DistributedBatchSampler": "compat.paddle.DistributedBatchSampler",
    "DistributedModel": "types.DistributedModel",
    "DistributedOptimizer": "compat.horovod.DistributedOptimizer",
    "EvaluationRecord": "callbacks.EvaluationRecord",
    "Initializer": "types.Initializer",
    "InspectedModule": "types.InspectedModule",
    "Inspection": "types.Inspection",
    "Layout": "types.Layout",
    "LossFunction": "types.LossFunction",
    "LossSums": "types.LossSums",
    "ModelOptimizer": "types.ModelOptimizer",
    "ModelPlan": "types.ModelPlan",
    "PreparedLoader": "types.PreparedLoader",
    "PreparedModule": "types.PreparedModule",
    "PreparedOptimizer": "types.PreparedOptimizer",
    "PreparedScheduler": "types.PreparedScheduler",
    "RunContext": "callbacks.RunContext",
    "Shard": "Sharded",
    "Split": "types.Split",
    "Splitter": "compat.paddle.Splitter",
    "StepRecord": "callbacks.StepRecord",
    "VerifiedModel": "types.VerifiedModel",
    "allreduce": "compat.horovod.allreduce",
    "broadcast_object": "compat.horovod.broadcast_object",
    "broadcast_optimizer_state": "compat.horovod.broadcast_optimizer_state",
    "broadcast_parameters": "compat.horovod.broadcast_parameters",
    "layers_by_rank": "pipeline.layers_by_rank",
    "partition_by_class": "pipeline.partition_by_class",
    "partition_by_cost": "pipeline.partition_by_cost",
    "partition_uniform": "pipeline.partition_uniform",
    "partition_uniform_chunks": "pipeline.partition_uniform_chunks",
    "split": "compat.paddle.split",
}
"""Name that was public once → where it is now; the old one keeps working."""


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
