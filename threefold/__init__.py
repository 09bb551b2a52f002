"""Threefold: train GPT-style language models in any data × tensor × pipeline layout, with equal results.

Everything the command line does is also available from Python under the names of this module and of its rooms
`callbacks`, `compat`, `pipeline` and `types`. They are imported on first use, so `import threefold` alone does not
import torch, which takes seconds.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final

from threefold.doors import added, imported

__version__ = "0.1.0"

_ROOMS: Final = {"callbacks": "api.callbacks", "compat": "compat", "pipeline": "api.pipeline", "types": "api.types"}
"""Room → its module, relative to the package."""
_NAMES: Final = {
    "api.checkpoint": "load save",
    "api.launch": "init_mesh run spawn",
    "api.model": "parallelize",
    "api.model_optimizer": "distributed_optimizer",
    "api.pipeline": "PipelineLayers",
    "api.schedule": "Schedule",
    "api.trainer": "Trainer",
    "comm.mesh": "Mesh",
    "config": "Config load_config",
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
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_ROOMS, *_MODULES, *added("NAMES")])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{_ROOMS[name]}")
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in added("NAMES"):
        return imported(added("NAMES")[name])
    close = get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
