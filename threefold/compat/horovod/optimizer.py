"""Horovod's optimizer, whose gradients are the mean over the ranks, and broadcasts of what ranks start from."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer

from threefold.compat.horovod.collectives import (
    Average,
    Compression,
    Compressor,
    Max,
    Min,
    Product,
    ReduceOperation,
    Sum,
    broadcast_async_,
    broadcast_object,
    compressor,
    require_operation,
)
from threefold.compat.horovod.ranks import world
from threefold.compat.prepared.gradients import buckets_by_dtype
from threefold.compat.prepared.optimizer import WrappedOptimizer
from threefold.dtypes import DTYPES
from threefold.errors import UserError, require_whole
from threefold.parallel.gradients import Gradients
from threefold.torch_private.runtime import at_end_of_backward_pass, backward_pass


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Broadcast parameters from one rank, so that all ranks start equal.

    Args:
        params: a `state_dict()`, pairs of names and tensors as from `named_parameters()`, or tensors as from
            `parameters()`; overwritten in place.
        root_rank: rank to broadcast from.

    Raises:
        UserError: `params` is none of them, or the rank does not exist.

    Example:
        ```python
        t3.compat.horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        ```
    """
    world(root_rank)
    pairs = params.items() if isinstance(params, Mapping) else params
    if isinstance(pairs, Tensor | nn.Module) or not isinstance(pairs, Iterable):
        raise UserError(
            f"params is of the type {type(params).__name__} but must be a state_dict or parameters; use "
            "model.state_dict()."
        )
    named = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
    started = [broadcast_async_(value, root_rank, name) for name, value in named if isinstance(value, Tensor)]
    for each in started:
        each.wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, model: nn.Module | None = None) -> None:
    """Broadcast the optimizer state and group options, such as the learning rate, from one rank.

    Args:
        optimizer: optimizer of the same parameters on every rank; only the root's needs a state.
        root_rank: rank to broadcast from.
        model: Horovod's argument for sparse parameters; ignored.

    Raises:
        UserError: the rank does not exist.

    Example:
        ```python
        t3.compat.horovod.broadcast_optimizer_state(optimizer, root_rank=0)
        ```
    """
    axis = world(root_rank)
    inner = optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
    state = broadcast_object(inner.state_dict() if axis.index == root_rank else None, root_rank)
    if axis.index != root_rank:
        inner.load_state_dict(state)


class DistributedOptimizer(WrappedOptimizer):
    """Optimizer that updates with the mean of the ranks' gradients.

    Each rank computes the loss of its own rows and calls `loss.backward()`, during which all-reduces run. When the last
    of a step's backward passes returns, each `.grad` is the mean over the ranks: it may be clipped, unscaled or logged
    with or without `synchronize`, which is needed only after fewer passes than declared. As with Horovod, gradients of
    several backward passes add up, so divide the loss by their number for a mean. They are summed in the buckets of
    `threefold.prepare`, which the next step overwrites: clone a `.grad` to keep it.

    For a plain module, replicated on every rank. (Not to be confused with `threefold.distributed_optimizer`, for a
    model from `threefold.parallelize`, whose `train_batch` sums the gradients.)

    Args:
        optimizer: any torch optimizer; its groups, state and defaults are shared.
        named_parameters: named parameters of the model, for error messages; optional.
        compression: `Compression.fp16` or `Compression.bf16` all-reduces gradients in 16 bits; a name works too.
        backward_passes_per_step: number of `backward` calls before each `step`.
        op: `Average` or `Sum`.
        gradient_predivide_factor: with `Average`, divide by this factor before the sum, and by the rest after it.
        num_groups, groups: Horovod's groups of all-reduces; ignored, as gradients are summed in buckets of 25 MB.
        sparse_as_dense: ignored; sparse gradients are summed as dense ones and are sparse again afterwards.
        process_set: None for all ranks.

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
        compression: Compressor | str = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOperation = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UserError(
                f"optimizer is of the type {type(optimizer).__name__} but must be a torch.optim.Optimizer; pass "
                "torch.optim.AdamW(model.parameters()), say."
            )
        self._size = world(process_set=process_set).size
        self._wire = DTYPES.get(compressor(compression).name) if self._size > 1 else None
        if require_operation(op) in (Min, Max, Product):
            raise UserError(f"op is {op.value} but gradients have a mean or a sum; use hvd.Average.")
        if gradient_predivide_factor != 1.0 and op is not Average:
            raise UserError(
                f"gradient_predivide_factor is {gradient_predivide_factor} but splits a mean, and op is {op.value}; "
                "use op=hvd.Average."
            )
        super().__init__(optimizer)
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._op, self._divisor = op, gradient_predivide_factor if self._size > 1 else 1.0
        self._names = _names(named_parameters)
        unnamed = sum(each not in self._names for each in self._held())
        if self._names and unnamed:
            raise UserError(
                f"named_parameters lacks {unnamed} of the optimizer's {len(self._held())} parameters; use "
                "model.named_parameters() of the optimizer's model."
            )
        self._pass = -1
        self._hooked: dict[Tensor, Node] = {}
        """Parameter → node of autograd that adds to its `.grad`, whose hook lasts only as long as the node is held."""
        self._parameters: list[Tensor] = []
        self._gradients: Gradients | None = None
        """Sums over the ranks, of several ranks."""
        self._begin()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of `backward` calls before each `step`, from the next `zero_grad` or `step` on."""
        require_whole("backward_passes_per_step", passes)
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Wait until each `.grad` is the mean of the ranks' gradients, which it is after a step's backward passes.

        Raises:
            UserError: there was no backward pass.
        """
        self._complete()
        self._passes = dict.fromkeys(self._parameters, 0)
        self._calls = 0

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` in the block use the gradients as they are, after a call of `synchronize`."""
        if self._are_incomplete():
            raise UserError("skip_synchronize was entered before synchronize; call optimizer.synchronize() first.")
        yield

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters with the mean of the ranks' gradients.

        Raises:
            UserError: a closure is given, or there was no backward pass.
        """
        if closure is not None:
            raise UserError("optimizer.step was given a closure, which would sum gradients twice; call it without.")
        self._complete()
        self.optimizer.step()
        self._begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.optimizer.zero_grad(set_to_none)
        self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are summed too."""
        self.optimizer.add_param_group(param_group)
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the original optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the original optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def begin_pass(self) -> None:
        """Begin a backward pass, unless its first gradient has; call it before autograd adds one to a `.grad`."""
        if backward_pass() != self._pass:
            self._pass = backward_pass()
            at_end_of_backward_pass(partial(_ended, weakref.ref(self)))
            self._take_back()

    def note(self, parameter: Tensor) -> None:
        """Count a parameter's gradient from autograd; raise a `UserError` if it is one too many for a step."""
        self._passes[parameter] += 1
        name = repr(self._names[parameter]) if parameter in self._names else "without a name"
        if self._passes[parameter] > self.backward_passes_per_step:
            raise UserError(
                f"The parameter {name} got a gradient {self._passes[parameter]} times since zero_grad but "
                f"backward_passes_per_step is {self.backward_passes_per_step}; set it to the number of backward passes "
                "before each step, and call zero_grad after it."
            )
        if self._op is Sum and parameter in self._summed:
            raise UserError(
                f"The parameter {name} got a gradient after its gradients had been summed over the ranks; use "
                "op=hvd.Average, or one backward pass of the sum of the losses."
            )
        if not self._is_summing:
            self._begin_sums()
        self._arrived.add(parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(parameter)

    def end_pass(self) -> None:
        """End a backward pass: complete the gradients after the last of a step, or show what there is so far."""
        self._calls += 1
        if self._calls % self.backward_passes_per_step == 0:
            self._sum()
        elif self._gradients is not None:
            for parameter in self._arrived:  # the sums have taken those of narrow parameters, which are rounded here
                parameter.grad = self._gradients[parameter].to(parameter.dtype)

    def _held(self) -> list[Tensor]:
        return [each for group in self.optimizer.param_groups for each in group["params"] if each.requires_grad]

    def _begin(self) -> None:
        """Begin a step."""
        held = self._held()
        if [*map(id, held)] != [*map(id, self._parameters)]:  # at first, or some were added, frozen or unfrozen
            self._parameters = held
            for parameter in held:  # before the hooks of the sums, which take the gradients
                if parameter not in self._hooked:
                    self._hooked[parameter] = node = get_gradient_edge(parameter).node
                    node.register_prehook(partial(_arrives, weakref.ref(self), parameter))
                    parameter.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self)))
            if self._size > 1:
                before = [each.grad for each in held]
                self._gradients = buckets_by_dtype(held, world(), self._wire)
                if self._divisor != 1.0:
                    self._gradients.observe(partial(_divide_, self._divisor))
                for parameter, grad in zip(held, before, strict=True):
                    parameter.grad = grad
        self._passes = dict.fromkeys(held, 0)
        self._arrived: set[Tensor] = set()
        """Parameters with a gradient from autograd since the last sum."""
        self._sparse: set[Tensor] = set()
        self._summed: set[Tensor] = set()
        self._calls = self._sums = 0
        self._is_summing = False
        self._pass = -1

    def _are_incomplete(self) -> bool:
        return bool(self._arrived) or not self._sums

    def _complete(self) -> None:
        """Make the gradients complete if passes have been made since the last sum, or none at all."""
        if self._are_incomplete():
            self._take_back()
            self._sum()

    def _begin_sums(self) -> None:
        self._is_summing = True
        if self._gradients is None:
            return
        # Gradients that the caller kept, or means before further passes, are not dropped: autograd adds to them.
        kept = {each: each.grad.detach().clone() for each in self._parameters if each.grad is not None}
        self._gradients.begin(None if self._sums else self.backward_passes_per_step)
        for parameter, grad in kept.items():
            parameter.grad = grad

    @torch.no_grad()
    def _take_back(self) -> None:
        """Take over what the caller has done to the gradients that the last pass left, such as `model.zero_grad()`."""
        for parameter in [*self._arrived]:
            if parameter.grad is None:
                self._arrived.discard(parameter)
                if self._gradients is not None:
                    self._gradients[parameter].zero_()
            elif self._gradients is not None and parameter.grad is not self._gradients[parameter]:
                if not torch.equal(parameter.grad, self._gradients[parameter].to(parameter.dtype)):
                    self._gradients[parameter].copy_(parameter.grad)
                parameter.grad = None  # of a narrow parameter, whose further gradients are added without rounding

    @torch.no_grad()
    def _sum(self) -> None:
        """Make each `.grad` the mean or sum over the ranks. Collective, in the same order on all of them."""
        if not self._is_summing:
            self._begin_sums()
        taken = self._arrived if self._gradients is not None else ()  # by the sums, from narrow parameters' `.grad`
        kept = {each: each.grad for each in self._parameters if each not in self._arrived and each.grad is not None}
        held = [each.grad is not None or each in taken for each in self._parameters]
        rows = [held, *([each in found for each in self._parameters] for found in (self._arrived, self._sparse))]
        flags = torch.tensor(rows, dtype=torch.float32)
        if self._gradients is not None:
            if self._op is Average:  # a mean of what is already the mean is itself; a sum takes only what is new
                for parameter, grad in kept.items():
                    self._gradients.add_(parameter, grad)
            self._gradients.finish()
            flags = world().all_reduce_(flags.to(self._parameters[0].device))  # after the buckets, as on other ranks
        ranks_with, ranks_new, ranks_sparse = (dict(zip(self._parameters, row, strict=True)) for row in flags.tolist())
        if not any(ranks_with.values()):
            raise UserError("optimizer.step was called without gradients; call loss.backward() before it.")
        changed = ranks_with if self._op is Average else ranks_new
        if self._gradients is not None:
            for parameter in self._parameters:
                parameter.grad = kept.get(parameter)
                if changed[parameter]:
                    value = self._gradients[parameter]
                    if self._op is Average:
                        value.mul_(self._divisor / self._size) if self._divisor != 1.0 else value.div_(self._size)
                    value = value.to(parameter.dtype)
                    parameter.grad = value.to_sparse(1) if ranks_sparse[parameter] else value
        self._summed |= {each for each in self._parameters if ranks_new[each]}
        self._arrived, self._sparse, self._is_summing = set(), set(), False
        self._sums += 1


def _divide_(divisor: float, sent: Tensor) -> None:
    sent.div_(divisor)


def _names(named_parameters: Iterable[tuple[str, nn.Parameter]] | None) -> dict[Tensor, str]:
    pairs = list(named_parameters or ())
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UserError("named_parameters has parameters without names; use model.named_parameters().")
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"named_parameters has the name {twice[0]!r} twice; use model.named_parameters() of one model.")
    return {parameter: name for name, parameter in pairs}


def _arrives(owner: "weakref.ref[DistributedOptimizer]", parameter: Tensor, _grads: tuple[Tensor, ...]) -> None:
    if (optimizer := owner()) is not None and parameter.requires_grad:
        optimizer.begin_pass()


def _arrived(owner: "weakref.ref[DistributedOptimizer]", parameter: Tensor) -> None:
    if (optimizer := owner()) is not None and parameter.requires_grad:
        optimizer.note(parameter)


def _ended(owner: "weakref.ref[DistributedOptimizer]") -> None:
    if (optimizer := owner()) is not None:
        optimizer.end_pass()
