"""A whole training step as one graph: forward and backward pass, collectives and update, without Python in between.

Captured are torch's operators on this rank's tensors, including collectives (as functional collectives, which name
their process group). Not captured: choices that Python makes by a tensor's
value, such as skipping a step or clipping by a norm that was read; the hooks of bucketed gradients; the sends of a
pipeline. Sizes, the learning rate and which layers run are fixed when the step is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from threefold.comm.axis import Axis
from threefold.torch_private.distributed import FUNCTIONAL_COLLECTIVES
from threefold.torch_private.tensors import foreach_copy_

_ops = FUNCTIONAL_COLLECTIVES


class _CapturableAxis(Axis):
    """An axis whose collectives are operators that a graph can hold."""

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
        assert self.group is not None  # an axis of several ranks has one
        return self.group.group_name

    def _sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self.size == 1 else self._reduce(tensor, "sum")

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        summed: Tensor = _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), operation, self._group_name))
        return summed


def capturable(axis: Axis) -> Axis:
    """The same ranks, with collectives that a graph can hold; for layers whose step is to be captured.

    They go through the process group, never through shared memory, and are not recorded. Gathers of
    unequal parts cannot be captured.
    """
    return _CapturableAxis(**{field.name: getattr(axis, field.name) for field in fields(axis) if field.init})


class CapturedStep:
    """A training step that was captured.

    Attributes:
        graph: the step, as a module of torch's operators.
    """

    def __init__(self, graph: GraphModule, parameters: Sequence[Tensor]) -> None:
        self.graph, self._parameters = graph, list(parameters)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Update the parameters in place by one step on `inputs`, of the shapes of the example; returns the loss."""
        with torch.no_grad():
            loss: Tensor = self.graph(self._parameters, *inputs)
        return loss


def capture_step(
    loss_of: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    update_: Callable[[Sequence[Tensor], Sequence[Tensor]], Any],
    *example: Tensor,
) -> CapturedStep:
    """Capture one training step. Collective over the ranks of the axes that are used.

    Args:
        loss_of: the loss of some inputs; uses `parameters`.
        parameters: to train (`local` of each parameter); unchanged.
        update_: changes parameters in place by their gradients.
        example: inputs of the shapes and dtypes that the steps will have.

    Raises:
        RuntimeError: torch cannot capture something that `loss_of` or `update_` does.
    """
    before = [parameter.detach().clone() for parameter in parameters]

    def step(leaves: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        loss = loss_of(*inputs)
        gradients = torch.autograd.grad(loss, list(leaves))
        with torch.no_grad():
            update_(leaves, gradients)
        return loss.detach()

    # Traced while it runs, on the tensors themselves: the layers reach their weights by reference, not as arguments.
    graph = make_fx(step, tracing_mode="real")(list(parameters), *example)
    with torch.no_grad():
        foreach_copy_([parameter.detach() for parameter in parameters], before)
    return CapturedStep(graph, parameters)
