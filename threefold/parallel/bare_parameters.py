"""Bare parameters of a user's modules that are cut over the tensor axis."""

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
    patterns = Patterns(rules)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one is split once
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        pattern = patterns.naming(name)
        owner, _, own = name.rpartition(".")
        dim = None if pattern is None else rules[pattern].cut_dim(own, axis.name)
        if dim is None:
            continue
        if parameter not in made:
            made[parameter] = split_parameter(parameter, axis, dim)
        module = model.get_submodule(owner)
        setattr(module, own, made[parameter])
        _read_local(module, own)


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
