"""Bare parameters and buffers of a user's modules that are cut over the tensor axis."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from threefold.comm.mesh import Axis
from threefold.models.name_pattern import Patterns
from threefold.models.sharding import Split
from threefold.parallel.parameter import is_split, local, split_parameter


def shard_bare(model: nn.Module, rules: Mapping[str, Split], axis: Axis) -> None:
    """Cut the parameters inside a module that the rules cut, in place; the modules around them read this rank's part.

    Args:
        model: whose parameters they are.
        rules: pattern of parameters → how they are cut.
        axis: the tensor axis.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one is split once
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        dim = bare_cut(rules, name, axis)
        if dim is None:
            continue
        if parameter not in made:
            made[parameter] = split_parameter(parameter, axis, dim)
        module = model.get_submodule(owner)
        setattr(module, own, made[parameter])
        _read_local(module, own)


def bare_cut(rules: Mapping[str, Split], name: str, axis: Axis) -> int | None:
    """The dim along which the rules cut a parameter or buffer by its own name; None where they do not."""
    pattern = Patterns(rules).naming(name) if rules and axis.size > 1 else None
    return None if pattern is None else rules[pattern].cut_dim(name.rpartition(".")[2], axis.name)


def _read_local(module: nn.Module, name: str) -> None:
    """Have a module read a parameter as the plain tensor that this rank computes with.

    By a property of a subclass, as `torch.nn.utils.parametrize` and `fully_shard` do it: the parameter itself stays
    where torch looks for it, under its name.
    """

    kind = type(module)
    if name in vars(kind):  # the module is in several places of the model
        return

    def read(self: nn.Module) -> Tensor:
        parameter = cast(Tensor, nn.Module.__getattr__(self, name))
        return local(parameter) if is_split(parameter) else parameter  # ZeRO has taken this rank's part over

    module.__class__ = type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})
