"""Prepared models: precision, whole-tensor state, gradient accumulation and synchronization."""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from threefold.api.checkpoint import LoopModel, LoopState
from threefold.checkpoint.errors import MODEL
from threefold.comm.mesh import Mesh
from threefold.compat.prepared.gradients import report_gradients
from threefold.compat.prepared.loader import BatchRows, CurrentBatch, map_tensors, tensors_in
from threefold.errors import UserError
from threefold.parallel.gradients import Gradients
from threefold.parallel.leaf import like, local, stored
from threefold.parallel.parameter import Weight, slice_of, whole
from threefold.parallel.whole_state import LoadedKeys
from threefold.random.rng import signed, stream_key
from threefold.resilience.data_agreement import require_one_batch
from threefold.train.gradient_update import GradientUpdate, LossScale

Reduction = Literal["mean", "sum"]

_ORIGIN = "threefold.prepared"
"""Key, in the metadata of an output's node in the autograd graph, of its `GradSync` and its batch's rows."""


class GradSync(GradientUpdate):
    """Accumulation of gradients over backward passes, and their sum over the replicas.

    Args:
        parameters: parameters of the model by name, as it stores them; those that require gradients are trained.
        partial_names: parameters that are whole on every tensor rank, which uses them only for its own heads.
        accumulate: backward passes per update.
        sharded: the model if the replicas shard its parameters, so that whole ones get the gradients; else None.
        from_first: buffers that every replica takes from the first after each update.

    Attributes:
        leaves: trained tensors by name.
        updates: number of sets of complete gradients so far.
        overflowed: whether the complete gradients are not finite, so the update is skipped.
        has_unused_gradients: whether the complete gradients wait for an optimizer.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        partial_names: Sequence[str],
        gradients: Gradients,
        mesh: Mesh,
        accumulate: int,
        loss_scale: LossScale | None,
        current: CurrentBatch,
        sharded: nn.Module | None,
        from_first: Sequence[Tensor] = (),
    ) -> None:
        self.all_parameters = dict(parameters)
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.accumulate, self.current = accumulate, current
        self.updates, self.overflowed = 0, False
        self.leaves = {name: local(stored(parameter)) for name, parameter in self.parameters.items()}
        weights = [Weight(name, stored(self.parameters[name]), leaf, leaf) for name, leaf in self.leaves.items()]
        partial_leaves = [self.leaves[name] for name in partial_names if name in self.leaves]
        super().__init__(mesh, gradients, weights, partial_leaves, loss_scale)
        self._passes = 0
        self._reduction: Reduction = "mean"
        self._nominal = 0.0  # divisor of the losses; 0 before the first
        self._weight = self._loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._arrived: set[str] = set()
        self._is_running = self._has_foreign = False
        self._used: dict[str, bool] = {}
        self._mean_loss: Tensor | None = None
        self.has_unused_gradients = False
        self._from_first = from_first
        if sharded is None:
            for name, leaf in self.leaves.items():
                leaf.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), name))
        else:
            report_gradients(sharded, partial(_arrived, weakref.ref(self)))

    @property
    def is_accumulating(self) -> bool:
        """Whether the update needs further backward passes."""
        return self._passes > 0

    @property
    def loss(self) -> float:
        """Mean loss over all rows of the last update whose backward passes are complete."""
        if self._mean_loss is None and self._passes:
            raise UserError(
                f"There is no loss yet: {self._passes} of the {self.accumulate} backward passes of the first update "
                "are made (accumulate); read it after the last one."
            )
        if self._mean_loss is None:
            raise UserError("There is no loss yet; call threefold.backward(loss) first.")
        return float(self._mean_loss)

    def mark(self, outputs: Any) -> None:
        """Record on the model's outputs which batch they belong to."""
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[_ORIGIN] = self, self.current.rows

    def backward(
        self, loss: Tensor, rows: BatchRows | None, reduction: Reduction, count: Tensor | float | None, retain: bool
    ) -> None:
        """Run one backward pass; the last one of an update sums the gradients over the replicas."""
        self.refuse_foreign_gradients()
        if self._passes and reduction != self._reduction:
            raise UserError(
                f"reduction is {reduction!r} but this update began with {self._reduction!r}; use one for all backward "
                "passes of an update."
            )
        counted = self._weight_of(rows, reduction, count)
        weight = torch.as_tensor(counted, dtype=torch.float64, device=loss.device).detach()
        if not self._passes:
            self._begin(weight)
        self._reduction = reduction
        self._arrived.clear()
        hooks, nothing = [], not counted
        if nothing:  # the mean over no rows, and so its gradient, may be NaN, which no factor turns into 0
            hooks = [node.register_prehook(_zeros) for node, sync, _ in _origins_of(loss) if sync is self]
        self._is_running = True
        try:
            (loss * (weight * (self.scale / self._nominal)).to(loss.dtype)).backward(retain_graph=retain)
        finally:
            self._is_running = False
            for hook in hooks:
                hook.remove()
        self._passes += 1
        self._weight = self._weight + weight
        if not nothing:
            self._loss = self._loss + weight * loss.detach().double()
        if self._passes == self.accumulate or (rows is not None and rows.last):
            self._finish()

    def clip_global_norm_(self, max_norm: float) -> Tensor | None:
        """Clip the gradients by their global norm; see `clip_grad_norm_`."""
        self.refuse_foreign_gradients()
        if self.is_accumulating:
            return None
        if not self.updates:
            raise UserError("clip_grad_norm_ was called before threefold.backward(loss); call it afterwards.")
        norm = self.squared_norm().sqrt().squeeze()
        if self.clip_(float(norm), max_norm):
            self._publish([parameter.grad is not None for parameter in self.parameters.values()])
        return norm

    def _weight_of(self, rows: BatchRows | None, reduction: Reduction, count: Tensor | float | None) -> Tensor | float:
        """Return the weight of a loss: the number of items that it averages, or 1 for a sum."""
        if rows is not None and rows.local == 0:
            return 0.0
        if count is not None:
            return count
        return 1.0 if reduction == "sum" or rows is None else float(rows.local)

    def _begin(self, weight: Tensor) -> None:
        left = [local(each.grad) for each in self.parameters.values() if each.grad is not None]
        # An optimizer that is not prepared removes or zeroes gradients itself, on all ranks alike.
        if self.has_unused_gradients and left:
            found = torch.stack([each.any() for each in left]).any()  # one rank's shards may happen to be zeros
            if self.mesh.world.all_reduce(found.double()):
                raise UserError(
                    "threefold.backward was called before the gradients of the backward pass before were used, which "
                    "would be lost; add the losses up and call it once, or call optimizer.step() or "
                    "optimizer.zero_grad() first."
                )
        self._weight = self._loss = torch.zeros_like(weight)
        if not self._nominal:
            # Losses are divided by the divisor of the update before, or by the likely one, as large values would
            # overflow in fp16. Where it is the final divisor, as with equal batches on one process, the backward pass
            # is that of `loss.backward()`, or of `GradScaler` in fp16, to the bit.
            self._nominal = _divisor(float(self.mesh.dp.all_reduce(weight)) * self.accumulate)
        self.begin(self.accumulate)
        self._used = dict.fromkeys(self.leaves, False)

    def _finish(self) -> None:
        self.finish()
        used = [float(each) for each in self._used.values()]
        flags = torch.tensor(used, dtype=torch.float64, device=self._weight.device)
        totals = self.mesh.dp.all_reduce_(torch.cat([self._weight.view(1), self._loss.view(1), flags]))
        weight, loss, *found = totals.tolist()
        self._passes = 0
        self.updates += 1
        if weight <= 0:
            raise UserError(
                f"count adds up to {weight:g} over the update but must be above 0; leave batches out where it is 0."
            )
        divisor = weight if self._reduction == "mean" else 1.0
        self._mean_loss = totals[1] / divisor
        self.unscale_(self.scale / self._nominal * divisor)
        self._nominal = _divisor(divisor)
        # As in plain PyTorch, values that are not finite stop an update with a loss scale alone.
        if self.loss_scale is not None:
            self.overflowed = not self.decide(float(self.squared_norm()) ** 0.5, loss).updates
        self._publish([flag > 0 for flag in found])
        self.has_unused_gradients = True
        for buffer in self._from_first:
            self.mesh.dp.broadcast_(buffer, 0)

    def _publish(self, has_gradient: Sequence[bool]) -> None:
        """Set `grad` of every parameter and of its trained tensor."""
        for (name, parameter), used in zip(self.parameters.items(), has_gradient, strict=True):
            leaf = self.leaves[name]
            gradient = self.gradients[leaf].to(leaf.dtype) if used else None
            leaf.grad = gradient
            if parameter is not leaf:
                parameter.grad = None if gradient is None else like(parameter, gradient)

    def note(self, name: str) -> None:
        """Record a parameter's gradient from autograd; raise a `UserError` if it is the second in a backward pass."""
        if not self._is_running:
            self._has_foreign = True
            return
        if name in self._arrived:
            raise UserError(
                f"The parameter {name!r} got two gradients in one backward pass, as with reentrant activation "
                "checkpointing of a weight that is used twice; use checkpoint(…, use_reentrant=False)."
            )
        self._arrived.add(name)
        self._used[name] = True

    def refuse_foreign_gradients(self) -> None:
        """Raise UserError if a backward pass that is not this object's has added to the gradients."""
        if self._has_foreign:
            self._has_foreign = False
            raise UserError(
                "loss.backward() was called on the loss of a prepared model, whose gradients are then not those of the "
                "global batch; call threefold.backward(loss) instead."
            )

    def discard(self) -> None:
        """Allow the gradients to be overwritten by the next backward pass, and forget those of any other."""
        self.has_unused_gradients = self._has_foreign = False


def _arrived(owner: "weakref.ref[GradSync]", name: str, _leaf: Tensor | None = None) -> None:
    """Note a gradient from a hook; `owner` is weak, as garbage collection misses cycles through hooks."""
    if (sync := owner()) is not None:
        sync.note(name)


def _divisor(value: float) -> float:
    """Return a number that losses can be divided by: `value`, or 1 if it is not positive."""
    return value if value > 0 and isfinite(value) else 1.0


def _metadata(node: Node) -> dict[Any, Any]:
    """Return the metadata dictionary of an autograd node, which torch's stub declares as a method."""
    return cast(dict[Any, Any], node.metadata)


def _origins_of(loss: Tensor) -> Iterator[tuple[Node, GradSync, BatchRows | None]]:
    """Yield the node, `GradSync` and rows of each prepared model's output that a loss depends on, nearest first."""
    waiting, seen = deque([loss.grad_fn]), set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _ORIGIN in (found := _metadata(node)):
            yield node, *found[_ORIGIN]
        waiting.extend(following for following, _ in node.next_functions)


def _zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


def backward(
    loss: Tensor,
    *,
    reduction: Reduction = "mean",
    count: Tensor | float | None = None,
    retain_graph: bool = False,
) -> None:
    """Run the backward pass of a prepared model's loss; replaces `loss.backward()`.

    Scales the loss for fp16 and for the number of rows. An update ends with its `accumulate`-th backward pass, or with
    that of the loader's last batch. After it, `.grad` on every rank is the gradient of the mean over the rows of all
    replicas and all backward passes of the update.

    Args:
        loss: scalar loss of this replica's rows.
        reduction: whether the loss is the mean over its rows or their sum; for a sum, gradients are those of the sum.
        count: number of items that the loss averages, if these are not the rows, such as the number of valid tokens.
        retain_graph: as in `torch.Tensor.backward`.

    Raises:
        UserError: the loss is not a scalar, or does not come from a prepared model.

    Example:
        ```python
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        t3.backward(loss, count=(labels != -100).sum())
        ```
    """
    if not isinstance(loss, Tensor):
        raise UserError(f"loss is of the type {type(loss).__name__} but must be a scalar tensor.")
    if loss.dim() > 0 and loss.numel() != 1:
        raise UserError(f"loss has the shape {[*loss.shape]} but must be a scalar; use loss.mean().")
    if reduction not in ("mean", "sum"):
        raise UserError(f"reduction is {reduction!r} but must be 'mean' or 'sum'; use 'mean'.")
    _, sync, rows = next(_origins_of(loss), (None, None, None))
    if sync is None:
        raise UserError(
            "The loss does not come from a model that prepare returned; compute it from the output of that one, with "
            "gradients enabled."
        )
    sync.backward(loss.reshape(()), rows, reduction, count, retain_graph)


_NARROW = (torch.float16, torch.bfloat16)


class PreparedModule(LoopModel, nn.Module):
    """An `nn.Module` returned by `prepare`.

    Calls, attributes, parameter names and `state_dict` are those of the original. The state has whole tensors in any
    layout, so saving it is collective with ZeRO or tensor parallelism.

    Attributes:
        module: the original; its parameters are now this rank's.
        sync: gradient synchronization.
        mesh: mesh of the ranks.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, sync: GradSync, mesh: Mesh, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module, self.sync, self.mesh, self._autocast = module, sync, mesh, autocast
        self._forwards = self._dropout_seed = 0
        self._is_compared = mesh.tp.size == 1
        if mesh.tp.size > 1:
            # Derived from the generator's seed: drawing would make the order of a shuffling loader depend on tp.
            seed = torch.tensor([stream_key("prepared", torch.initial_seed(), mesh.dp.index)], device=mesh.device)
            self._dropout_seed = int(mesh.tp.broadcast_(seed, 0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original's forward pass in the given precision; narrow outputs are widened to fp32."""
        narrow = self._autocast is not None
        if not self._is_compared:
            self._is_compared = True
            require_one_batch((args, kwargs), self.mesh, "In the first forward pass", self.mesh.tp)
        with torch.autocast(self.mesh.device.type, self._autocast) if narrow else nullcontext(), self._same_dropout():
            outputs = self.module(*args, **kwargs)
        if narrow:
            outputs = map_tensors(outputs, lambda tensor: tensor.float() if tensor.dtype in _NARROW else tensor)
        if torch.is_grad_enabled():
            self.sync.mark(outputs)
        return outputs

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the original's parameters under its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the original's buffers under its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original's state with whole tensors. Collective if they are sharded."""
        state = self.module.state_dict(*args, **kwargs)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name in state:
            if name in parameters:
                state[name] = whole(stored(parameters[name])).detach()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadedKeys:
        """Load whole tensors; each rank keeps its shards.

        Raises:
            UserError: shapes differ, or `strict` is set and names are missing or unknown.
        """
        if assign:
            raise UserError("assign is true but a prepared model keeps its own tensors; use false.")
        held = self.module.state_dict()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        missing = [name for name in held if name not in state_dict]
        loaded = LoadedKeys.checked(missing, [name for name in state_dict if name not in held], strict)
        self.sync.gradients.weights_changed()
        for name in (name for name in held if name in state_dict):
            into = stored(parameters[name]) if name in parameters else held[name]
            value = state_dict[name]
            if into.shape != value.shape:
                raise UserError(
                    f"The state has {name!r} of shape {[*value.shape]} but the model's has {[*into.shape]}; pass that "
                    "of the same model."
                )
            local(into).detach().copy_(slice_of(into, value))
        return loaded

    def loop_state(self) -> LoopState:
        """Return the state for a checkpoint."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) not in seen:  # keep a tied weight once
                seen.add(id(value))
                kept = stored(value) if isinstance(value, nn.Parameter) else value
                found[MODEL + name] = like(kept, local(kept).detach())
        return LoopState(self.mesh, found, self.sync.loss_scale, "prepare")

    def loop_state_filled(self, facts: Mapping[str, Any]) -> None:
        """Take over a checkpoint."""
        self.sync.gradients.weights_changed()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    @contextmanager
    def _same_dropout(self) -> Iterator[None]:
        """Draw the same random numbers on all tensor ranks, so that replicated activations stay equal."""
        if self.mesh.tp.size == 1 or not self.training:
            yield
            return
        self._forwards += 1
        device, on_cpu = self.mesh.device, self.mesh.device.type == "cpu"
        with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
            torch.manual_seed(signed(stream_key("prepared", self._dropout_seed, self._forwards), 63))
            yield
