"""Types of the names of `threefold`, which are imported on first use."""

from threefold import compat as compat
from threefold.api import callbacks as callbacks
from threefold.api import pipeline as pipeline
from threefold.api import types as types
from threefold.api.checkpoint import load as load
from threefold.api.checkpoint import save as save
from threefold.api.launch import init_mesh as init_mesh
from threefold.api.launch import run as run
from threefold.api.launch import spawn as spawn
from threefold.api.model import parallelize as parallelize
from threefold.api.model_optimizer import distributed_optimizer as distributed_optimizer
from threefold.api.pipeline import PipelineLayers as PipelineLayers
from threefold.api.trainer import Trainer as Trainer
from threefold.comm.mesh import Mesh as Mesh
from threefold.compat.map_dataset import DistributedDataLoader as DistributedDataLoader
from threefold.compat.map_dataset import GlobalBatchSampler as GlobalBatchSampler
from threefold.compat.paddle import split as split
from threefold.compat.prepared.launcher import notebook_launcher as notebook_launcher
from threefold.compat.prepared.loader import gather_for_metrics as gather_for_metrics
from threefold.compat.prepared.model import backward as backward
from threefold.compat.prepared.prepare import clip_grad_norm_ as clip_grad_norm_
from threefold.compat.prepared.prepare import prepare as prepare
from threefold.config import Config as Config
from threefold.config import load_config as load_config
from threefold.errors import UserError as UserError
from threefold.launch.failure import RankFailed as RankFailed
from threefold.lesson.explain import explain as explain
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
from threefold.planner.notebook import show as show
from threefold.planner.notebook import simulate as simulate
from threefold.random.dropout import Dropout as Dropout
from threefold.random.dropout import sample_keys as sample_keys
from threefold.random.rng import RandomStreams as RandomStreams
from threefold.train.callbacks.base import Callback as Callback
from threefold.train.stop import Stopped as Stopped
from threefold.verify.api import verify_model as verify_model
from threefold.verify.inspection import inspect as inspect

__version__: str
__all__: list[str]
