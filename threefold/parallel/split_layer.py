"""Bases of tensor-parallel layers: a split weight and its initial values, and the checks of their arguments."""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any, Final, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.doors import hook
from threefold.errors import UserError
from threefold.models.sharding import Split
from threefold.ops.arithmetic import LayerArithmetic
from threefold.parallel.leaf import held, stored
from threefold.parallel.parameter import empty_parameter, in_place_of, offset, slice_of, split_parameter
from threefold.random.rng import fill_normal_, stream_key

Initializer = Callable[[Tensor], Tensor | None]
"""Function that sets a whole weight in place, as those of `torch.nn.init` do, or returns other values."""


class SplitLayer(nn.Module):
    """Base class of the layers: a weight that a rule splits, and its initial values."""

    weight: nn.Parameter
    axis: Axis
    sequence_dim: int | None
    arithmetic: LayerArithmetic
    rule: Split
    """Rule that splits the parameters."""

    def _empty(self, name: str, shape: tuple[int, ...]) -> nn.Parameter:
        """Return this rank's part of a parameter, uninitialised."""
        dim = self.rule.cut_dim(name, "tp")
        return nn.Parameter(torch.empty(shape)) if dim is None else empty_parameter(shape, self.axis, dim)

    def _split(self, name: str, whole: Tensor) -> nn.Parameter:
        dim = self.rule.cut_dim(name, "tp")
        return cast(nn.Parameter, whole) if dim is None else split_parameter(whole, (self.axis, dim))

    def _shapes(self) -> str:
        """Describe the shapes of the weight and of this rank's part, which computes, for `repr`."""
        # With ZeRO the stored weight is a shard of this rank's part.
        whole, shard = tuple(stored(self.weight).shape), tuple(held(self.weight).shape)
        return f"weight {whole}, {shard} on {self.axis.name} rank {self.axis.index} of {self.axis.size}"

    def reset_parameters(self, name: str, seed: int = 0, std: float = 0.02) -> None:
        """Draw the weight from N(0, std²), keyed by `seed` and `name`: the same whole weight for every axis size.

        For layers that are made directly; a run's initial weights are those of its plan (`parallel.parameter.draw_`).
        """
        with torch.no_grad():
            key = stream_key(seed, name)
            fill_normal_(held(self.weight), std, key, tuple(self.weight.shape), offset(self.weight))


class SplitLinear(SplitLayer):
    """Linear layer with a split weight, and a bias or none."""

    bias: nn.Parameter | None

    @classmethod
    def _from(cls, module: nn.Linear, axis: Axis, **options: Any) -> Self:
        with torch.device("meta"):
            # With a name, nothing is drawn from torch's generator; the weight made here is replaced.
            layer = cls(module.in_features, module.out_features, axis, name="", **options)
        layer.weight = layer._split("weight", module.weight)
        layer.bias = None if module.bias is None else layer._split("bias", module.bias)
        return in_place_of(layer, module)

    def _initialise(
        self,
        shape: tuple[int, int],
        bias: bool,
        name: str | None,
        seed: int,
        weight_init: Initializer | None,
        bias_init: Initializer | None,
    ) -> None:
        """Draw weight and bias, each by its initializer if given, else keyed by the name, else as `nn.Linear` does."""
        self.weight = self._empty("weight", shape)
        self.register_parameter("bias", self._empty("bias", shape[:1]) if bias else None)
        if name is not None:
            self.reset_parameters(name, seed)
        key = new_key(name, seed) if name is None or weight_init or bias_init else 0
        if name is None:
            bound = 1 / sqrt(shape[1]) if shape[1] else 0.0
            weight_init = weight_init or partial(nn.init.kaiming_uniform_, a=sqrt(5))
            bias_init = bias_init or partial(nn.init.uniform_, a=-bound, b=bound)
        if weight_init is not None:
            fill_(self.weight, weight_init, key, "weight_init")
        if bias_init is not None and self.bias is not None:
            fill_(self.bias, bias_init, key + 1, "bias_init")

    def reset_parameters(self, name: str, seed: int = 0, std: float = 0.02) -> None:
        """Draw the weight from N(0, std²), keyed by `seed` and `name`, and set the bias to zero."""
        super().reset_parameters(name, seed, std)
        if self.bias is not None:
            with torch.no_grad():
                held(self.bias).zero_()


def new_key(name: str | None, seed: int) -> int:
    """Return the key of initial values, from name and seed; else a random number that equally seeded ranks share."""
    return int(torch.randint(2**62, (), device="cpu")) if name is None else stream_key("initial", seed, name)


@torch.no_grad()
def fill_(parameter: Tensor, initializer: Initializer, key: int, what: str) -> None:
    """Set this rank's shard of a parameter to its part of the values that `initializer` gives the whole.

    Each rank has the whole in memory while it is drawn, on the CPU and in fp32 at least; on the meta device nothing is
    drawn. The initializer draws from torch's default generator, which is seeded with `key` and restored afterwards.
    `what` is the name of the argument in errors.
    """
    if not callable(initializer):
        raise UserError(
            f"{what} is {initializer!r} but must be a function of the whole weight; use one such as "
            "torch.nn.init.xavier_normal_."
        )
    if parameter.is_meta:
        return
    whole = torch.zeros(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        returned = initializer(whole)
    if isinstance(returned, Tensor):
        if returned.shape != whole.shape:
            raise UserError(
                f"{what} returns a tensor of shape {[*returned.shape]} but the whole weight has {[*whole.shape]}; "
                "return that, or change the weight in place."
            )
        whole = returned
    keep_shard_(parameter, whole)


@torch.no_grad()
def keep_shard_(parameter: Tensor, whole: Tensor) -> None:
    """Set this rank's shard of a parameter to its part of the whole values."""
    held(parameter).copy_(slice_of(parameter, whole))


_Init = TypeVar("_Init", bound=Callable[..., None])


def explaining_arguments(init: _Init) -> _Init:
    """Make the constructor of a layer raise a `UserError` that says which argument it lacks or does not have.

    The room `compat` knows what such arguments are called in other systems; without it, Python's own error is raised.
    """
    explained: Callable[[_Init], _Init] | None = hook("explaining_arguments")
    return init if explained is None else explained(init)


AN_AXIS: Final = "use mesh.tp of mesh = threefold.init_mesh(tp=2), say"


def check_axis(axis: Any, argument: str) -> None:
    """Raise a `UserError`, which names the argument, unless it is an axis of a mesh."""
    if not isinstance(axis, Axis):
        raise UserError(f"{argument} is a {type(axis).__name__} but must be an axis of a mesh; {AN_AXIS}.")


def check_sizes(axis: Any, **sizes: Any) -> None:
    check_axis(axis, "axis")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise UserError(f"{name} is {size!r} but must be a whole number of at least 0; use {name}=1.")
