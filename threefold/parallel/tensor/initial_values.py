"""Initial values that a function such as `nn.init.xavier_normal_` draws: of the whole weight, of which a rank keeps its
shard, so that they are the same in every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor, nn

from threefold.errors import UserError
from threefold.parallel.parameter import local, offset
from threefold.random.keys import stream_key

Initializer = Callable[[Tensor], Tensor | None]
"""Sets the values of a whole weight in place, as the functions of `torch.nn.init` do, or returns others."""


def new_key(name: str | None, seed: int) -> int:
    """The key of a layer's initial values: of its name and a seed, or without a name torch's next random number, which
    is the same on every rank that was seeded alike."""
    return int(torch.randint(2**62, (), device="cpu")) if name is None else stream_key("initial", seed, name)


@torch.no_grad()
def fill_(parameter: Tensor, initializer: Initializer, key: int, what: str) -> None:
    """Set this rank's shard of a parameter to its part of what `initializer` makes of the whole.

    Each rank has the whole in memory while it is drawn, on the CPU and in fp32 at least.

    Args:
        parameter: as the layer stores it; on the meta device nothing is drawn.
        initializer: draws from torch's default generator, which is seeded with `key` for it and restored after it.
        what: names the argument in errors.

    Raises:
        UserError: `initializer` is no function, or returns a tensor of another shape.
    """
    if not callable(initializer):
        raise UserError(
            f"{what} is {initializer!r} but must be a function of the whole weight; use one such as "
            "torch.nn.init.xavier_normal_."
        )
    held = local(parameter).detach()
    if held.is_meta:
        return
    whole = torch.zeros(parameter.shape, dtype=torch.promote_types(held.dtype, torch.float32), device="cpu")
    with _drawing_from(key):
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
    """Set this rank's shard of a parameter to its part of whole values."""
    held = local(parameter).detach()
    for dim, (first, size) in enumerate(zip(offset(parameter), held.shape, strict=True)):
        whole = whole.narrow(dim, first, size)
    held.copy_(whole)


def linear_weight_(weight: Tensor) -> Tensor:
    """As `nn.Linear` draws its weight [out, in]."""
    return nn.init.kaiming_uniform_(weight, a=sqrt(5))


def linear_bias(in_features: int) -> Initializer:
    """As `nn.Linear` draws its bias."""
    bound = 1 / sqrt(in_features) if in_features else 0.0
    return lambda bias: nn.init.uniform_(bias, -bound, bound)


@contextmanager
def _drawing_from(key: int) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(before)
