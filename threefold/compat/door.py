"""Contributions of the calls of other systems to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("resilience", "verify")
HOOKS: Final = {
    "explaining_arguments": "threefold.compat.layer_arguments:explaining_arguments",
    "split_tensor": "threefold.compat.split_tensor:SplitTensor",
}
NAMES: Final = {
    "DistributedDataLoader": "threefold.compat.map_dataset:DistributedDataLoader",
    "GlobalBatchSampler": "threefold.compat.map_dataset:GlobalBatchSampler",
    "backward": "threefold.compat.prepared.model:backward",
    "clip_grad_norm_": "threefold.compat.prepared.prepare:clip_grad_norm_",
    "gather_for_metrics": "threefold.compat.prepared.loader:gather_for_metrics",
    "notebook_launcher": "threefold.compat.prepared.launcher:notebook_launcher",
    "prepare": "threefold.compat.prepared.prepare:prepare",
    "split": "threefold.compat.paddle:split",
}
TYPES: Final = {
    "PreparedLoader": "threefold.compat.prepared.loader:PreparedLoader",
    "PreparedModule": "threefold.compat.prepared.model:PreparedModule",
    "PreparedOptimizer": "threefold.compat.prepared.optimizer:PreparedOptimizer",
    "PreparedScheduler": "threefold.compat.prepared.optimizer:PreparedScheduler",
}
