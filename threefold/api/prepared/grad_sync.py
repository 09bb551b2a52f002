"""Gradient accumulation and synchronization of prepared models, and their `backward`."""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, log2
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from threefold.api.prepared.loader import BatchRows, CurrentBatch, tensors_in
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.parallel.gradients import Gradients
from threefold.parallel.parameter import Weight, like, local, stored
from threefold.parallel.zero import report_gradients
from threefold.train.optim import LossScale
from threefold.train.step import GradientNorm, clip_

Reduction = Literal["mean", "sum"]

_ORIGIN = "threefold.prepared"


@dataclass(frozen=True)
class _Origin:
    """Origin of a model's output, attached to its node in the autograd graph."""

    sync: "GradSync"
    rows: BatchRows | None


class GradSync:
    """Accumulation of gradients over backward passes, and their sum over the replicas.

    Args:
        parameters: parameters of the model by name, as it stores them; those that require gradients are trained.
        partial_names: parameters that every tensor rank holds whole but uses only for its own heads.
        gradients: buffers that accumulate the gradients.
        mesh: mesh of the replicas.
        accumulate: backward passes per update.
        loss_scale: loss scale of fp16; None for no scaling.
        current: batch in progress.
        sharded: the model if the replicas shard its parameters, so that whole ones get the gradients; else None.
        from_first: buffers that every replica takes from the first after each update.

    Attributes:
        all_parameters: all parameters, including frozen ones.
        parameters: trained parameters.
        leaves: trained tensors by name.
        updates: number of sets of complete gradients so far.
        overflowed: whether the complete gradients are not finite, so the update is skipped.
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
        self.gradients, self.mesh, self.accumulate = gradients, mesh, accumulate
        self.loss_scale, self.current = loss_scale, current
        self.updates, self.overflowed = 0, False
        self.leaves = {name: local(stored(parameter)) for name, parameter in self.parameters.items()}
        weights = [Weight(name, stored(self.parameters[name]), leaf, leaf) for name, leaf in self.leaves.items()]
        self._norm = GradientNorm(gradients, weights, mesh)
        self._partial = [self.leaves[name] for name in partial_names if name in self.leaves]
        self._passes = 0
        self._reduction: Reduction = "mean"
        self._nominal: float | None = None
        self._weight = self._loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._arrived: set[str] = set()
        self._used: dict[str, bool] = {}
        self._mean_loss: Tensor | None = None
        self._unused = False
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
        origin = _Origin(self, self.current.rows)
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[_ORIGIN] = origin

    def backward(
        self, loss: Tensor, rows: BatchRows | None, reduction: Reduction, count: Tensor | float | None, retain: bool
    ) -> None:
        """Run one backward pass; the last one of an update sums the gradients over the replicas."""
        if self._passes and reduction != self._reduction:
            raise UserError(
                f"reduction is {reduction!r} but this update began with {self._reduction!r}; use one for all backward "
                "passes of an update."
            )
        counted = self._weight_of(rows, reduction, count)
        weight = torch.as_tensor(counted, dtype=torch.float64, device=loss.device).detach()
        scale = self._begin(weight, rows) if not self._passes else self._scale()
        self._reduction = reduction
        self._arrived.clear()
        nothing = not counted
        # The mean over no rows, and so its gradient, may be NaN, which no factor turns into 0.
        outputs = [node for node, origin in _origins_of(loss) if origin.sync is self] if nothing else []
        hooks = [node.register_prehook(_zeros) for node in outputs]
        try:
            (loss * (weight * scale).to(loss.dtype)).backward(retain_graph=retain)
        finally:
            for hook in hooks:
                hook.remove()
        self._passes += 1
        self._weight = self._weight + weight
        if not nothing:
            self._loss = self._loss + weight * loss.detach().double()
        if self._passes == self.accumulate or (rows is not None and rows.last):
            self._finish()

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the whole model's gradients (fp64 scalar, equal on every rank). Collective."""
        return self.mesh.world.all_reduce_(self._norm.squared())

    def clip_(self, max_norm: float) -> Tensor | None:
        """Clip the gradients by their global norm; see `clip_grad_norm_`."""
        if self.is_accumulating:
            return None
        if not self.updates:
            raise UserError("clip_grad_norm_ was called before threefold.backward(loss); call it after that.")
        norm = self.squared_norm().sqrt()
        if clip_(self.gradients, float(norm), max_norm):
            self._publish([parameter.grad is not None for parameter in self.parameters.values()])
        return norm

    def weights_changed(self) -> None:
        """Record that the weights were updated."""
        self.gradients.weights_changed()

    def gradients_used(self) -> None:
        """Allow the next update to overwrite the complete gradients."""
        self._unused = False

    def _weight_of(self, rows: BatchRows | None, reduction: Reduction, count: Tensor | float | None) -> Tensor | float:
        """Return the weight of a loss: the number of items that it averages, or 1 for a sum."""
        if rows is not None and rows.own == 0:
            return 0.0
        if count is not None:
            return count
        return 1.0 if reduction == "sum" or rows is None else float(rows.own)

    def _begin(self, weight: Tensor, rows: BatchRows | None) -> float:
        if self._unused and self._holds_gradients():
            raise UserError(
                "threefold.backward was called before the gradients of the backward pass before were used, which would "
                "be lost; add the losses up and call it once, or call optimizer.step() or optimizer.zero_grad() first."
            )
        self._weight = self._loss = torch.zeros_like(weight)
        if self._nominal is None:
            # Losses are divided by about the final divisor, as large values would overflow in fp16.
            total = float(self.mesh.dp.all_reduce(weight)) * self.accumulate
            self._nominal = _power_of_two(total)
        self.gradients.begin(self.accumulate)
        self._used = dict.fromkeys(self.leaves, False)
        return self._scale()

    def _holds_gradients(self) -> bool:
        """Return whether a gradient is left; an optimizer that is not prepared removes or zeroes gradients itself."""
        left = [local(each.grad) for each in self.parameters.values() if each.grad is not None]
        if not left:  # on all ranks alike
            return False
        found = torch.stack([each.any() for each in left]).any()  # one rank's shards may happen to be zeros
        return bool(self.mesh.world.all_reduce(found.double()))

    def _scale(self) -> float:
        assert self._nominal is not None  # set by `_begin`
        return (1.0 if self.loss_scale is None else self.loss_scale.value) / self._nominal

    def _finish(self) -> None:
        scale = self._scale()
        self.gradients.finish()
        if self._partial:
            self.mesh.tp.all_reduce_together_([self.gradients[leaf] for leaf in self._partial])
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
        self.gradients.scale_(1.0 / (scale * divisor))
        self._nominal = _power_of_two(divisor)
        self.overflowed = False
        if self.loss_scale is not None:
            finite = isfinite(loss) and isfinite(float(self.squared_norm()))
            self.loss_scale.update(finite)
            self.overflowed = not finite
        self._publish([flag > 0 for flag in found])
        self._unused = True
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
        """Record a parameter's gradient from autograd.

        Raises:
            UserError: it is the second one in a backward pass; the sum over the replicas may already have started.
        """
        if name in self._arrived:
            raise UserError(
                f"The parameter {name!r} got two gradients in one backward pass, as with reentrant activation "
                "checkpointing of a weight that is used twice; use checkpoint(…, use_reentrant=False)."
            )
        self._arrived.add(name)
        self._used[name] = True


def _arrived(owner: "weakref.ref[GradSync]", name: str, _leaf: Tensor | None = None) -> None:
    """Note a gradient, from a hook; a weak reference, as garbage collection does not find a cycle through hooks."""
    sync = owner()
    if sync is not None:
        sync.note(name)


def _power_of_two(value: float) -> float:
    """Return the nearest power of two, so that dividing by it is exact; 1 if there is none."""
    return 2.0 ** round(log2(value)) if value > 0 and isfinite(value) else 1.0


def _metadata(node: Node) -> dict[Any, Any]:
    """Return the metadata dictionary of an autograd node, which torch's stub declares as a method."""
    return cast(dict[Any, Any], node.metadata)


def _origins_of(loss: Tensor) -> Iterator[tuple[Node, _Origin]]:
    """Yield the graph nodes and origins of the prepared models' outputs that a loss depends on, the nearest first."""
    waiting, seen = deque([loss.grad_fn]), set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(found := _metadata(node).get(_ORIGIN), _Origin):
            yield node, found
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
    """Run the backward pass of a prepared model's loss, in place of `loss.backward()`.

    Scales the loss for fp16 and for the number of rows. After the last backward pass of an update (the `accumulate`-th,
    or the one of the loader's last batch), `.grad` on every rank is the gradient of the mean over the rows of all
    replicas and all these backward passes.

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
    origin = next((origin for _, origin in _origins_of(loss)), None)
    if origin is None:
        raise UserError(
            "The loss does not come from a model that prepare returned; compute it from the output of that one, with "
            "gradients enabled."
        )
    origin.sync.backward(loss.reshape(()), origin.rows, reduction, count, retain_graph)
