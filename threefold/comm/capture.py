"""Capture of a whole training step as one graph: forward and backward pass, collectives and update, without Python.

The graph holds torch's operators on this rank's tensors, and functional collectives. It cannot hold decisions that
Python bases on a tensor's value (a skipped step, clipping by a norm that is read), the hooks of bucketed gradients, or
the sends of a pipeline. Sizes, the learning rate and the layers that run are fixed when the step is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from threefold.comm.axis import Axis
from threefold.torch_private.distributed import FUNCTIONAL_COLLECTIVES as _ops
from threefold.torch_private.tensors import foreach_copy_


class _CapturableAxis(Axis):
    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._sum(tensor)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor if self.size == 1 else tensor.copy_(self._sum(tensor))

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        return tensor if self.size == 1 else tensor.copy_(self._reduce(tensor, "max"))

    def all_gather_equal(self, tensor: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return tensor
        dim %= tensor.dim()
        moved = tensor.movedim(dim, 0).contiguous()
        joined: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(moved, self.size, self._group_name))
        return joined.movedim(0, dim).contiguous()

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return tensor
        dim %= tensor.dim()
        moved = tensor.movedim(dim, 0).contiguous()
        part: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(moved, "sum", self.size, self._group_name))
        return part.movedim(0, dim).contiguous()

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if self.size == 1:
            return tensor
        raise RuntimeError("a gather of parts whose sizes may differ cannot be captured; use gather_output=False")

    def start_all_reduce_(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return None
        raise RuntimeError("an asynchronous all-reduce cannot be captured; use all_reduce_")

    @property
    def _group_name(self) -> str:
        assert self.group is not None
        return self.group.group_name

    def _sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self.size == 1 else self._reduce(tensor, "sum")

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        summed: Tensor = _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), operation, self._group_name))
        return summed


def capturable(axis: Axis) -> Axis:
    """Return the same axis with collectives that a graph can hold, for layers whose step is to be captured.

    These collectives use the process group, never shared memory, and are not recorded. Gathers of unequal shards cannot
    be captured, nor can the sums of an exact run.
    """
    if axis.in_tree:
        raise ValueError("the sums of an exact run cannot be captured; make the mesh with exact=False")
    return _CapturableAxis(**{field.name: getattr(axis, field.name) for field in fields(axis) if field.init})


class CapturedStep:
    """A captured training step, as the module `graph` of torch's operators."""

    def __init__(self, graph: GraphModule, parameters: Sequence[Tensor]) -> None:
        self.graph, self._parameters = graph, list(parameters)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Update the parameters in place by one step on `inputs`, shaped as the example; return the loss."""
        with torch.no_grad():
            loss: Tensor = self.graph(self._parameters, *inputs)
        return loss


def capture_step(
    loss_of: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    update_: Callable[[Sequence[Tensor], Sequence[Tensor]], Any],
    *example: Tensor,
) -> CapturedStep:
    """Capture one training step. Collective over the ranks of the axes that it uses.

    Args:
        loss_of: function from inputs to the loss; uses `parameters`.
        parameters: tensors to train (`local` of each parameter); unchanged.
        update_: function that changes parameters in place, given them and their gradients.
        example: inputs with the shapes and dtypes of the steps to come.
    """
    before = [parameter.detach().clone() for parameter in parameters]

    def step(leaves: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        loss = loss_of(*inputs)
        gradients = torch.autograd.grad(loss, list(leaves))
        with torch.no_grad():
            update_(leaves, gradients)
        return loss.detach()

    # Traced with real tensors, because the layers refer to their weights directly instead of taking them as arguments.
    graph = make_fx(step, tracing_mode="real")(list(parameters), *example)
    with torch.no_grad():
        foreach_copy_([parameter.detach() for parameter in parameters], before)
    return CapturedStep(graph, parameters)
