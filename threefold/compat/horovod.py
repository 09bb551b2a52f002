"""Data parallelism in the style of Horovod: the optimizer sums the gradients, and `loss.backward()` stays unchanged.

Requires `torch.distributed` to be initialised, for example by `threefold.init_mesh()` or a launcher.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from threefold.api.prepared_optimizer import WrappedOptimizer
from threefold.comm.axis import Axis, EventRecorder
from threefold.dtypes import DTYPES
from threefold.errors import UserError, require_whole
from threefold.parallel.gradient_sums import COMPRESSIONS
from threefold.parallel.gradients import buckets_by_dtype
from threefold.plugins import require_one_of

__all__ = [
    "DistributedOptimizer",
    "allreduce",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> None:
    """Broadcast parameters from one rank, so that all ranks start equal.

    Args:
        parameters: a `state_dict()`, or pairs of names and tensors as from `named_parameters()`; overwritten in place.
        root_rank: rank to broadcast from.

    Raises:
        UserError: `parameters` is neither, or the rank does not exist.

    Example:
        ```python
        t3.compat.horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        ```
    """
    world = _world(root_rank)
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
    if isinstance(pairs, Tensor | nn.Module) or not isinstance(pairs, Iterable):
        raise UserError(
            f"parameters is of the type {type(parameters).__name__} but must be a state_dict or named parameters; use "
            "model.state_dict()."
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UserError(
                "parameters has tensors without names but must have pairs of both; use model.named_parameters()."
            )
        if isinstance(pair[1], Tensor):
            world.broadcast_(pair[1].detach(), root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Broadcast the optimizer state and group options, such as the learning rate, from one rank.

    Args:
        optimizer: optimizer of the same parameters on every rank; only the root's needs a state.
        root_rank: rank to broadcast from.

    Raises:
        UserError: the rank does not exist.

    Example:
        ```python
        t3.compat.horovod.broadcast_optimizer_state(optimizer, root_rank=0)
        ```
    """
    world = _world(root_rank)
    inner = optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
    state = world.gather_objects(inner.state_dict() if world.index == root_rank else None)[root_rank]
    if world.index != root_rank:
        inner.load_state_dict(state)


def broadcast_object(value: Any, root_rank: int = 0) -> Any:
    """Broadcast a Python object from one rank.

    Args:
        value: a picklable object; ignored on the other ranks.
        root_rank: rank to broadcast from.

    Returns:
        the value of the root rank.

    Raises:
        UserError: the rank does not exist.

    Example:
        ```python
        first_epoch = t3.compat.horovod.broadcast_object(first_epoch, root_rank=0)
        ```
    """
    world = _world(root_rank)
    return world.gather_objects(value if world.index == root_rank else None)[root_rank]


def allreduce(tensor: Tensor, average: bool = True) -> Tensor:
    """Return the mean, or the sum, of a tensor over the ranks; `tensor` is unchanged.

    Args:
        tensor: tensor of the same shape on every rank.
        average: whether to divide the sum by the number of ranks.

    Returns:
        a new tensor, the same on every rank.

    Raises:
        UserError: `torch.distributed` is not initialised.

    Example:
        ```python
        mean = t3.compat.horovod.allreduce(torch.tensor(correct / rows))
        ```
    """
    world = _world()
    total = world.all_reduce(tensor.detach())
    return total / world.size if average else total


class DistributedOptimizer(WrappedOptimizer):
    """Optimizer that updates with the mean of the ranks' gradients.

    Each rank computes the loss of its own rows and calls `loss.backward()`, during which all-reduces start; `step()`
    waits for them. As with Horovod, gradients of several backward passes add up, so divide the loss by their number for
    a mean.

    For a plain module, replicated on every rank. (Not to be confused with `threefold.distributed_optimizer`, for a
    model from `threefold.parallelize`, whose `train_batch` sums the gradients.)

    Args:
        optimizer: any torch optimizer; its groups, state and defaults are shared.
        named_parameters: named parameters of the model, for error messages; optional.
        compression: `fp16` or `bf16` all-reduces gradients in 16 bits.
        backward_passes_per_step: number of `backward` calls before each `step`.

    Attributes:
        optimizer: the original.

    Raises:
        UserError: an argument is wrong, or a parameter of the optimizer is not among the named ones.

    Example:
        ```python
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = t3.compat.horovod.DistributedOptimizer(optimizer, model.named_parameters())
        t3.compat.horovod.broadcast_parameters(model.state_dict())
        t3.compat.horovod.broadcast_optimizer_state(optimizer)
        for x, y in loader:  # of this rank's rows
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ```
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        compression: str = "none",
        backward_passes_per_step: int = 1,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UserError(
                f"optimizer is of the type {type(optimizer).__name__} but must be a torch.optim.Optimizer; pass "
                "torch.optim.AdamW(model.parameters()), say."
            )
        require_one_of("compression", compression, COMPRESSIONS)
        require_whole("backward_passes_per_step", backward_passes_per_step)
        super().__init__(optimizer)
        self.backward_passes_per_step = backward_passes_per_step
        self._axis = _world()
        self._parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters or ()}
        unnamed = sum(each not in self._names for each in self._parameters)
        if self._names and unnamed:
            raise UserError(
                f"named_parameters lacks {unnamed} of the optimizer's {len(self._parameters)} parameters; use "
                "model.named_parameters() of the optimizer's model."
            )
        self._gradients = buckets_by_dtype(self._parameters, self._axis, DTYPES.get(compression))
        self._passes: dict[Tensor, int] = {}
        self._is_synchronized = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self)))
        self.zero_grad()

    def synchronize(self) -> None:
        """Wait until each `.grad` is the mean of the ranks' gradients, for example to clip them before `step`."""
        if self._is_synchronized:
            return
        flags = torch.tensor([float(self._passes[each] > 0) for each in self._parameters])
        used = self._axis.all_reduce_(flags.to(self._parameters[0].device)).tolist()
        self._gradients.finish()
        if not any(used):
            raise UserError("optimizer.step was called without gradients; call loss.backward() before it.")
        self._gradients.scale_(1.0 / self._axis.size)
        for parameter, ranks in zip(self._parameters, used, strict=True):
            parameter.grad = self._gradients[parameter].to(parameter.dtype) if ranks else None
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` in the block use the gradients as they are, after a call of `synchronize`."""
        if not self._is_synchronized:
            raise UserError("skip_synchronize was entered before synchronize; call optimizer.synchronize() first.")
        yield

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters with the mean of the ranks' gradients.

        Raises:
            UserError: a closure is given, or there was no backward pass.
        """
        if closure is not None:
            raise UserError("optimizer.step was given a closure, which would sum gradients twice; call it without.")
        self.synchronize()
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self._gradients.begin(self.backward_passes_per_step)
        for parameter in self._parameters:
            self._passes[parameter] = 0
        self._is_synchronized = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the original optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the original optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def note(self, parameter: Tensor) -> None:
        """Count a parameter's gradient from autograd; raise a `UserError` if it is one too many for a step."""
        self._passes[parameter] += 1
        if self._passes[parameter] > self.backward_passes_per_step:
            name = self._names.get(parameter, "without a name")
            raise UserError(
                f"The parameter {name!r} got a gradient {self._passes[parameter]} times since zero_grad but "
                f"backward_passes_per_step is {self.backward_passes_per_step}; set it to the number of backward passes "
                "before each step, and call zero_grad after it."
            )


def _arrived(owner: "weakref.ref[DistributedOptimizer]", parameter: Tensor) -> None:
    if (optimizer := owner()) is not None:
        optimizer.note(parameter)


def _world(root_rank: int = 0) -> Axis:
    """Return the axis of all ranks of the default process group; raise a `UserError` if it lacks the root."""
    if not dist.is_initialized():
        raise UserError(
            "torch.distributed is not initialised, so there are no ranks; call threefold.init_mesh() first."
        )
    ranks = tuple(range(dist.get_world_size()))
    if root_rank not in ranks:
        raise UserError(f"root_rank is {root_rank!r} but the world has the ranks 0 to {ranks[-1]}; use 0.")
    return Axis("world", ranks, dist.get_rank(), dist.group.WORLD, EventRecorder())
