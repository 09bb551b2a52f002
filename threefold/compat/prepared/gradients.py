"""Gradients of a model that has its values: in buckets by dtype, or sharded by ZeRO together with the parameters."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from threefold.comm.axis import Axis
from threefold.parallel.gradients import GradientBuckets, Gradients, JoinedGradients
from threefold.parallel.leaf import local, with_marks
from threefold.parallel.parameter import replace_parameters
from threefold.parallel.zero import ZeroSharding, describe, kept_whole, units_of, when_accumulated, wrap_layers


def buckets_by_dtype(
    leaves: Iterable[Tensor],
    axis: Axis,
    wire: torch.dtype | None = None,
    longest: Mapping[Tensor, int] | None = None,
    tp: Axis | None = None,
) -> Gradients:
    """Make buckets for leaves of mixed float dtypes; gradients narrower than fp32 are accumulated in fp32."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(torch.promote_types(leaf.dtype, torch.float32), []).append(leaf)
    parts = [
        (group, GradientBuckets(group, axis, dtype, wire=wire, longest=longest, tp=tp))
        for dtype, group in groups.items()
    ]
    return parts[0][1] if len(parts) == 1 else JoinedGradients(parts)


def shard_values(
    module: nn.Module, zero: ZeroSharding, compression: torch.dtype | None = None, tp: Axis | None = None
) -> None:
    """Shard the parameters of a module that has its values, in place; a rank keeps its shards.

    Each layer of the outermost `nn.ModuleList`s is gathered by itself, the rest together. `compression` is the
    16-bit dtype of the gradients' sums over ranks (None for their own; micro-batches are added up at full width), and
    `tp` the tensor ranks if it is given.
    """
    before = dict(module.named_parameters())
    kept = kept_whole(module, zero)

    def plain(each: nn.Parameter) -> nn.Parameter:  # `fully_shard` cuts contiguous tensors only
        return each if each in kept else nn.Parameter(local(each).detach().contiguous(), each.requires_grad)

    replace_parameters(module, plain)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    wrap_layers(module, _listed_layers(module), zero, policy, compression, tp)
    for name, parameter in module.named_parameters():
        if before[name] not in kept:
            describe(with_marks(parameter, before[name]), before[name], zero.shards)


def report_gradients(module: nn.Module, report: Callable[[str], None]) -> None:
    """Call `report(name)` when autograd has accumulated a parameter's gradient, for a module of `shard_values`."""

    def arrived(name: str, _parameter: Tensor) -> None:
        report(name)

    for unit, places in units_of(module).items():
        when_accumulated(unit, places, arrived)


def _listed_layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules in the outermost lists, except containers, which are not called themselves."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += [each for each in child if not isinstance(each, nn.ModuleList | nn.ModuleDict)]
        else:
            found += _listed_layers(child)
    return found
