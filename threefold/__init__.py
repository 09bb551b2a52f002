"""Threefold: train GPT-style language models in any data × tensor × pipeline layout, with equal results.

Everything the command line does is also available from Python under the names of this module. They are imported on
first use, so `import threefold` alone does not import torch, which takes seconds.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold.api import callbacks
    from threefold.api.checkpoint import load, save
    from threefold.api.horovod import (
        DistributedOptimizer,
        allreduce,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from threefold.api.inspect_model import InspectedModule, Inspection, inspect
    from threefold.api.launch import notebook_launcher, run, spawn
    from threefold.api.mesh import init_mesh
    from threefold.api.model import DistributedModel, parallelize
    from threefold.api.optimizer import ModelOptimizer, distributed_optimizer
    from threefold.api.pipeline import PipelineLayers
    from threefold.api.prepared.grad_sync import backward
    from threefold.api.prepared.loader import PreparedLoader, gather_for_metrics
    from threefold.api.prepared.module import PreparedModule
    from threefold.api.prepared.optimizer import PreparedOptimizer, PreparedScheduler
    from threefold.api.prepared.prepare import clip_grad_norm_, prepare
    from threefold.api.trainer import Trainer
    from threefold.api.verification import VerifiedModel, verify_model
    from threefold.comm.axis import Axis
    from threefold.comm.layout import Coordinates, Layout
    from threefold.comm.mesh import Mesh
    from threefold.config import Config, load_config
    from threefold.data.map_dataset import DataLoader, DistributedBatchSampler
    from threefold.errors import UserError
    from threefold.launch.failure import RankFailed
    from threefold.models.loss_terms import CountedLoss, LossFunction, LossSums, LossTerm
    from threefold.models.plan import Plan
    from threefold.models.sharding import (
        Column,
        Constant,
        ModelPlan,
        Normal,
        PerHead,
        Replicated,
        Row,
        Shard,
        Split,
        Vocab,
    )
    from threefold.parallel.pipeline.partition import (
        layers_by_rank,
        partition_by_class,
        partition_by_cost,
        partition_uniform,
        partition_uniform_chunks,
    )
    from threefold.parallel.tensor.functional import Splitter, split
    from threefold.parallel.tensor.layers import (
        ColumnParallelLinear,
        Initializer,
        ParallelCrossEntropy,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    from threefold.random.dropout import Dropout, sample_keys
    from threefold.random.rng import RandomStreams
    from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
    from threefold.train.stop import Stopped

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Callback",
    "Column",
    "ColumnParallelLinear",
    "Config",
    "Constant",
    "Coordinates",
    "CountedLoss",
    "DataLoader",
    "DistributedBatchSampler",
    "DistributedModel",
    "DistributedOptimizer",
    "Dropout",
    "EvaluationRecord",
    "Initializer",
    "InspectedModule",
    "Inspection",
    "Layout",
    "LossFunction",
    "LossSums",
    "LossTerm",
    "Mesh",
    "ModelOptimizer",
    "ModelPlan",
    "Normal",
    "ParallelCrossEntropy",
    "PerHead",
    "PipelineLayers",
    "Plan",
    "PreparedLoader",
    "PreparedModule",
    "PreparedOptimizer",
    "PreparedScheduler",
    "RandomStreams",
    "RankFailed",
    "Replicated",
    "Row",
    "RowParallelLinear",
    "RunContext",
    "Shard",
    "Split",
    "Splitter",
    "StepRecord",
    "Stopped",
    "Trainer",
    "UserError",
    "VerifiedModel",
    "Vocab",
    "VocabParallelEmbedding",
    "allreduce",
    "backward",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "callbacks",
    "clip_grad_norm_",
    "distributed_optimizer",
    "gather_for_metrics",
    "init_mesh",
    "inspect",
    "layers_by_rank",
    "load",
    "load_config",
    "notebook_launcher",
    "parallelize",
    "partition_by_class",
    "partition_by_cost",
    "partition_uniform",
    "partition_uniform_chunks",
    "prepare",
    "run",
    "sample_keys",
    "save",
    "spawn",
    "split",
    "verify_model",
]

_MODULES: Final = {
    "Axis": "comm.axis",
    "Callback": "train.callbacks.base",
    "Column": "models.sharding",
    "ColumnParallelLinear": "parallel.tensor.layers",
    "Config": "config",
    "Constant": "models.sharding",
    "Coordinates": "comm.layout",
    "CountedLoss": "models.loss_terms",
    "DataLoader": "data.map_dataset",
    "DistributedBatchSampler": "data.map_dataset",
    "DistributedModel": "api.model",
    "DistributedOptimizer": "api.horovod",
    "Dropout": "random.dropout",
    "EvaluationRecord": "train.callbacks.base",
    "Initializer": "parallel.tensor.layers",
    "InspectedModule": "api.inspect_model",
    "Inspection": "api.inspect_model",
    "Layout": "comm.layout",
    "LossFunction": "models.loss_terms",
    "LossSums": "models.loss_terms",
    "LossTerm": "models.loss_terms",
    "Mesh": "comm.mesh",
    "ModelOptimizer": "api.optimizer",
    "ModelPlan": "models.sharding",
    "Normal": "models.sharding",
    "ParallelCrossEntropy": "parallel.tensor.layers",
    "PerHead": "models.sharding",
    "PipelineLayers": "api.pipeline",
    "Plan": "models.plan",
    "PreparedLoader": "api.prepared.loader",
    "PreparedModule": "api.prepared.module",
    "PreparedOptimizer": "api.prepared.optimizer",
    "PreparedScheduler": "api.prepared.optimizer",
    "RandomStreams": "random.rng",
    "RankFailed": "launch.failure",
    "Replicated": "models.sharding",
    "Row": "models.sharding",
    "RowParallelLinear": "parallel.tensor.layers",
    "RunContext": "train.callbacks.base",
    "Shard": "models.sharding",
    "Split": "models.sharding",
    "Splitter": "parallel.tensor.functional",
    "StepRecord": "train.callbacks.base",
    "Stopped": "train.stop",
    "Trainer": "api.trainer",
    "UserError": "errors",
    "VerifiedModel": "api.verification",
    "Vocab": "models.sharding",
    "VocabParallelEmbedding": "parallel.tensor.layers",
    "allreduce": "api.horovod",
    "backward": "api.prepared.grad_sync",
    "broadcast_object": "api.horovod",
    "broadcast_optimizer_state": "api.horovod",
    "broadcast_parameters": "api.horovod",
    "callbacks": "api",
    "clip_grad_norm_": "api.prepared.prepare",
    "distributed_optimizer": "api.optimizer",
    "gather_for_metrics": "api.prepared.loader",
    "init_mesh": "api.mesh",
    "inspect": "api.inspect_model",
    "layers_by_rank": "parallel.pipeline.partition",
    "load": "api.checkpoint",
    "load_config": "config",
    "notebook_launcher": "api.launch",
    "parallelize": "api.model",
    "partition_by_class": "parallel.pipeline.partition",
    "partition_by_cost": "parallel.pipeline.partition",
    "partition_uniform": "parallel.pipeline.partition",
    "partition_uniform_chunks": "parallel.pipeline.partition",
    "prepare": "api.prepared.prepare",
    "run": "api.launch",
    "sample_keys": "random.dropout",
    "save": "api.checkpoint",
    "spawn": "api.launch",
    "split": "parallel.tensor.functional",
    "verify_model": "api.verification",
}
"""Module that defines each public name, relative to the package."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        close = get_close_matches(name, _MODULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
