"""This rank's shard of a whole tensor."""

from torch import Tensor

from threefold.parallel.parameter import local, offset


def slice_of(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's shard of a whole value of a parameter, as a view.

    Args:
        parameter: as `stored` gives it.
        value: of the parameter's whole shape.
    """
    for dim, (start, size) in enumerate(zip(offset(parameter), local(parameter).shape, strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim]), size)
    return value
