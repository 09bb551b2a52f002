"""Parallel models for custom training loops (`parallelize`), and their optimizers (`distributed_optimizer`)."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn

from threefold.api.launch import mesh_of_all_ranks
from threefold.comm.mesh import Mesh
from threefold.config import PrecisionConfig
from threefold.dtypes import DTYPES
from threefold.errors import UserError, naming_arguments, require_whole
from threefold.models.loss_terms import LossFunction, LossSums
from threefold.models.plan import Plan
from threefold.models.sharding import ModelPlan
from threefold.models.source import error_line
from threefold.parallel.gradient_sums import COMPRESSIONS
from threefold.parallel.parallelize import PieceSizes, TrainingSettings
from threefold.parallel.parameter import ShardedMatrix, publish_
from threefold.plugins import require_one_of
from threefold.train.optim import GradientNorm
from threefold.train.optimizers import UpdatedWeights
from threefold.train.step import GradientStep, clip_and_update
from threefold.train.update_rule import Entry, LossScale


def with_arguments(model: Callable[..., Any], arguments: Mapping[str, Any] | None) -> Callable[[], Any]:
    """Bind keyword arguments to a model's constructor; raise UserError if one is unknown or missing."""
    given = dict(arguments or {})
    name = getattr(model, "__name__", type(model).__name__)
    try:
        signature = inspect.signature(model)
    except ValueError:  # a class implemented in C
        return partial(model, **given)
    takes = {each.name: each for each in signature.parameters.values() if each.kind in _BY_NAME}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    for each in given:
        if each not in takes and not takes_any:
            close = get_close_matches(each, takes, n=1)
            near = f"the nearest is {close[0]!r}" if close else "leave it out"
            raise UserError(f"arguments has {each!r}, which {name} does not take; {near}.")
    for parameter in takes.values():
        if parameter.default is parameter.empty and parameter.name not in given:
            raise UserError(f"{name} needs the argument {parameter.name}; give arguments={{{parameter.name!r}: …}}.")
    return partial(model, **given) if given else model


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


PRECISIONS = ("fp32", "bf16", "fp16")
_MOST_FOR_A_STAGE = 64
"""Upper limit, in micro-batches per stage, of the search for the smallest number that a schedule accepts."""


class DistributedModel:
    """This rank's part of a model, and the gradients of a global batch.

    Made by `parallelize`. The optimizer updates `parameters()`: this rank's shards of the weights, in the dtype of the
    update.

    Attributes:
        mesh: mesh of the ranks.
        last: terms of the last loss by name, and the number of items that they count.
        loss_scale: loss scale of fp16; None without loss scaling.
        publications: number of calls of `publish`.
        updates: number of optimizer steps made, including those that fp16 skipped; determines the next dropout masks.
        has_gradients: whether there are gradients that no optimizer has used yet.
    """

    def __init__(self, gradient_step: GradientStep) -> None:
        self.gradient_step, self.mesh, self.loss_scale = gradient_step, gradient_step.mesh, gradient_step.loss_scale
        self.last = LossSums()
        self.publications = 0
        self.updates = 0
        self.has_gradients = False

    def parameters(self) -> Iterator[Tensor]:
        """Return this rank's shards of the weights for an optimizer; some may be empty; frozen ones lack gradients."""
        return (weight.master for weight in self.gradient_step.model.weights)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of `parameters()` with their names in the whole model."""
        return ((weight.name, weight.master) for weight in self.gradient_step.model.weights)

    def train_batch(self, batch: Any, loss_fn: LossFunction | None = None) -> float:
        """Run forward and backward passes of a global batch, and sum the gradients over the replicas.

        Collective over the world.

        Args:
            batch: this replica's samples: a tensor, or a tuple, list, mapping or `NamedTuple` of tensors with the
                samples along dim 0. The first layer receives those that the parameters of its `forward` name, or all
                but the last of a tuple. Must be equal on all ranks of the replica.
            loss_fn: `loss_fn(output, batch)`, called with the last layer's output, returns the mean over the samples of
                a micro-batch, or terms by name (`CountedLoss`). None if the last layer computes the loss from tokens
                and labels.

        Returns:
            the mean loss of the global batch, the same float on every rank.

        Raises:
            UserError: batch, model and loss do not fit together, or the gradients of the previous batch were not used.
        """
        if self.has_gradients:
            raise UserError(
                "train_batch is called before the optimizer has used the gradients of the batch before, which would be "
                "lost; call optimizer.step() or optimizer.zero_grad() first."
            )
        with _checked(loss_fn):
            self.last = self.gradient_step.train_batch(batch, self.updates, loss_fn)
        self.has_gradients = True
        return self.last.loss

    def eval_batch(self, batch: Any, loss_fn: LossFunction | None = None) -> float:
        """Compute the mean loss of a global batch, without gradients or dropout.

        Collective over the world.

        Args:
            batch, loss_fn: as in `train_batch`.

        Returns:
            the mean loss, the same float on every rank.

        Raises:
            UserError: batch, model and loss do not fit together.
        """
        with _checked(loss_fn):
            self.last = self.gradient_step.eval_batch(batch, loss_fn)
        return self.last.loss

    def publish(self) -> None:
        """Round the weights into the tensors that the model computes with, after a change of `parameters()`."""
        publish_(self.gradient_step.model.weights, self.gradient_step.gradients)
        self.publications += 1


def parallelize(
    model: Callable[..., nn.Module],
    plan: Plan | ModelPlan | None = None,
    mesh: Mesh | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    zero: Literal[0, 1, 2, 3] = 0,
    zero_shards: int | None = None,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    partition: str | tuple[int, ...] = "cost",
    recompute: str = "none",
    recompute_every: int = 1,
    gradient_compression: Literal["none", "fp16", "bf16"] = "none",
    compile: bool = False,
    seed: int = 0,
) -> DistributedModel:
    """Distribute a single-device model over a mesh; its initial weights equal those of a single process.

    Collective over the world.

    Args:
        model: class of the model or a function that makes it; called on the meta device, so no rank holds more than its
            shards.
        plan: layers of the model and how each weight is sharded. None if the class has an attribute `plan`, and for
            `PipelineLayers`, which have their own.
        mesh: mesh from `init_mesh`; None for one replica per rank.
        arguments: keyword arguments of `model`.
        dtype: dtype of the computation, fp32 by default. For narrower dtypes weights are kept and updated in fp32
            (mixed precision), with dynamic loss scaling for fp16.
        precision: dtype by name, `fp32`, `bf16` or `fp16`, as in `prepare`.
        zero: ZeRO stage: shard optimizer state (1), gradients (2) and weights (3) over the replicas.
        zero_shards: number of replicas that share one copy; None for all.
        micro_batches: number of micro-batches of a replica's samples; None for the fewest that the pipeline schedule
            accepts, or 1 without a pipeline.
        schedule: pipeline schedule, as `parallel.schedule` of a config.
        partition: partition of the layers into stages, as `parallel.partition` of a config.
        recompute: activation checkpointing (recompute): `none`, or a key of the plan's `recompute`, such as `full`.
        recompute_every: recompute every n-th of those layers.
        gradient_compression: dtype that gradients are rounded to for the sum over the replicas.
        compile: whether layers are compiled with `torch.compile`.
        seed: seed of initial weights and dropout.

    Returns:
        this rank's part of the model.

    Raises:
        UserError: the plan does not fit the model, or an argument does not fit the mesh.

    Example:
        >>> mesh = threefold.init_mesh(dp=2, tp=2, pp=2)
        >>> model = threefold.parallelize(MyModel, plan, mesh, zero=1, micro_batches=2)
        >>> optimizer = threefold.distributed_optimizer(torch.optim.AdamW(model.parameters()), model)
        >>> for batch in loader:
        ...     loss = model.train_batch(batch, loss_fn)
        ...     optimizer.step()
    """
    if isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__} that already exists whole on this rank; give its class or a "
            "function that makes it, such as `lambda: MyModel(...)`."
        )
    if not callable(model):
        raise UserError(f"model is {model!r} but must be a class or function that makes the model; give that.")
    if isinstance(plan, Mesh):
        raise UserError("plan is a Mesh but must be a Plan; where the model has its own, give mesh by name: mesh=mesh.")
    mesh = mesh_of_all_ranks() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh is a {type(mesh).__name__} but must be a Mesh; make it with threefold.init_mesh().")
    made = with_arguments(model, arguments)
    dtype = _dtype(dtype, precision)
    if zero not in (0, 1, 2, 3):
        raise UserError(f"zero is {zero!r} but must be 0, 1, 2 or 3; use 1.")
    require_one_of("gradient_compression", gradient_compression, COMPRESSIONS)
    if gradient_compression != "none" and zero:
        raise UserError(
            f"gradient_compression is {gradient_compression!r} but zero is {zero}, which would also add the "
            "micro-batches up in 16 bits; use gradient_compression='none' or zero=0."
        )
    if zero_shards is not None and (zero_shards < 1 or mesh.dp.size % zero_shards):
        raise UserError(f"zero_shards is {zero_shards} but must divide dp {mesh.dp.size}; use {mesh.dp.size}.")
    if micro_batches is not None:
        require_whole("micro_batches", micro_batches)
    settings = TrainingSettings(
        seed=seed,
        micro_batches=micro_batches or 1,
        dtype=dtype,
        zero=zero,
        zero_shards=zero_shards,
        gradient_compression=gradient_compression,
        schedule=schedule,
        partition=partition,
        recompute=recompute,
        recompute_every=recompute_every,
        compile=compile,
        pieces=PieceSizes.of_device(mesh.device.type),
    )
    with naming_arguments():
        try:
            if micro_batches is None and mesh.pp.size > 1:
                accepts, pp = settings.pipeline_schedule.accepts, mesh.pp.size
                # The fewest that the schedule accepts, or 1 if it accepts none, which it reports itself.
                counts = range(1, _MOST_FOR_A_STAGE * pp + 1)
                settings = replace(settings, micro_batches=next((each for each in counts if accepts(pp, each)), 1))
            scale = LossScale.of(PrecisionConfig(dtype="fp16")) if dtype == torch.float16 else None
            step = GradientStep(made, _plan_of(model, plan, made), mesh, settings, loss_scale=scale)
        except ValueError as error:  # unknown schedule
            raise UserError(f"{str(error).rstrip('.')}.") from error
    return DistributedModel(step)


def _plan_of(model: Callable[..., nn.Module], plan: Any, make: Callable[[], nn.Module]) -> ModelPlan:
    """Return the complete plan that was given, or the model's own."""
    owner = model.func if isinstance(model, partial) else model
    name = getattr(owner, "__name__", None)
    if plan is None:
        plan = owner if hasattr(owner, "build") else getattr(owner, "plan", None)
        if plan is None:
            raise UserError(
                f"plan is missing and {name or owner} has none; give plan=threefold.Plan(…), which "
                "threefold.inspect proposes, or give the class the attribute plan."
            )
    if isinstance(plan, ModelPlan):
        return plan
    if not hasattr(plan, "build"):
        raise UserError(
            f"plan is a {type(plan).__name__} but must be a Plan, which names the model's layers; make one."
        )
    try:
        with torch.device("meta"):
            made = make()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise UserError(
            f"{name or 'The model'} cannot be made on the meta device, on which ranks make their parts of it "
            f"({error_line(error)}); have its constructor read no values of tensors, and give initial values that need "
            "them in Plan(initial=…)."
        ) from error
    built: ModelPlan = plan.build(made)
    return built


def _dtype(dtype: Any, precision: Any) -> torch.dtype:
    """Return the dtype of the computation; raise UserError if it is unknown, or both arguments are given."""
    if precision is not None and dtype is not None:
        raise UserError(f"dtype is {dtype} and precision is {precision!r}; leave one of the two out.")
    if precision is not None:
        require_one_of("precision", precision, PRECISIONS)
        return DTYPES[precision]
    if dtype is None:
        return torch.float32
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype is {dtype!r} but must be a dtype of torch; use torch.bfloat16.")
    if not dtype.is_floating_point:
        raise UserError(f"dtype is {dtype}, which is not a float dtype; use torch.bfloat16.")
    return dtype


def _checked(loss_fn: Any) -> AbstractContextManager[None]:
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(f"loss_fn is {loss_fn!r} but must be a function of the output and the batch; give one.")
    return naming_arguments()


class ModelOptimizer:
    """One or several optimizers over this rank's shards of a model, with the exact global gradient norm.

    Made by `distributed_optimizer`. If an optimizer needs whole weights, its groups contain whole weights instead of
    shards.

    Attributes:
        optimizers: the torch optimizers; their `param_groups` have the learning rates, for schedulers of `torch.optim`.
        model: model that they update.
        entries: trained shards with their gradients.
        grad_norm: global gradient norm of the last step before clipping; None before the first step.
        step_was_skipped: whether the last step updated nothing because fp16 gradients overflowed.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: DistributedModel,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.optimizers, self.model, self.clip_grad_norm = tuple(optimizers), model, clip_grad_norm
        self.grad_norm: float | None = None
        self.step_was_skipped = False
        step = model.gradient_step
        self._pairs: list[tuple[torch.optim.Optimizer, UpdatedWeights]] = []
        self._of: dict[str, tuple[torch.optim.Optimizer, UpdatedWeights]] = {}
        found: dict[str, Entry] = {}
        for optimizer in self.optimizers:
            own, gathers = {id(each) for each in _parameters(optimizer)}, needs_whole_weights(optimizer)
            entries: dict[int, Entry] = {}
            for weight in step.model.trained:
                if id(weight.master) in own:
                    matrix = ShardedMatrix(weight.parameter, step.parallelism.sharding_axes, every_dim=gathers)
                    entry = Entry(weight.name, weight.parameter, weight.leaf, weight.master, step.gradients, matrix)
                    entries[id(weight.master)] = found[weight.name] = entry
            updated = UpdatedWeights(list(entries.values()), gathers)
            for group in optimizer.param_groups:
                group["params"] = [
                    updated.of(entries[id(each)]) if id(each) in entries else each  # a frozen one, without a gradient
                    for each in group["params"]
                ]
            self._pairs.append((optimizer, updated))
            self._of |= dict.fromkeys((entry.name for entry in entries.values()), self._pairs[-1])
        self.entries = [found[weight.name] for weight in step.model.trained]
        self._norm = GradientNorm(step.gradients, self.entries, model.mesh, step.model.tied)
        self._seen = model.publications

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer, usually the only one."""
        return self.optimizers[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all torch optimizers."""
        return [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> float:
        """Clip the gradients by their global norm and update the weights. Collective over the world.

        If fp16 gradients overflow, nothing is updated on any rank and the loss scale is halved.

        Returns:
            the global gradient norm before clipping, the same float on every rank.

        Raises:
            UserError: there are no gradients, or they are not finite and no smaller loss scale could help; nothing is
                updated then, on any rank.
        """
        if not self.model.has_gradients:
            raise UserError(
                "optimizer.step() is called without gradients; call model.train_batch(batch, loss_fn) first."
            )
        model, step = self.model, self.model.gradient_step
        # Equal on every rank, so all ranks make the same decision.
        norm = float(model.mesh.world.all_reduce_(self._norm.squared_or_overflow().view(1)).item()) ** 0.5
        lr = self.param_groups[0].get("lr", 0)
        goes_on = clip_and_update(
            step.gradients,
            norm,
            self.clip_grad_norm,
            self._update,
            finite=isfinite(norm),
            scale=step.loss_scale,
            undo=step.buffers.undo,
        )
        if not goes_on:
            raise UserError(
                f"The gradient norm of update {model.updates + 1} is {norm:g}; lower the learning rate "
                f"({lr:g}), to {lr / 2:g} say."
            )
        self.grad_norm, self.step_was_skipped = norm, not isfinite(norm)
        model.updates += 1
        model.has_gradients = False
        return norm

    def zero_grad(self) -> None:
        """Discard the gradients; each step does so by itself."""
        self.model.has_gradients = False

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield the name of each trained weight, the weight, and this rank's shard of it."""
        return ((entry.name, entry.parameter, entry.master) for entry in self.entries)

    def states(self) -> Iterator[tuple[str, str, Any, Tensor]]:
        """Yield the optimizer state: weight name, state name, value, and the value as a global tensor."""
        for entry in self.entries:
            optimizer, updated = self._of[entry.name]
            for name, value in optimizer.state.get(updated.of(entry), {}).items():
                if value is None:
                    continue
                tensor = torch.as_tensor(value)
                part = updated.shard_of_state(entry, tensor)
                whole = part if updated.is_replicated(entry, tensor.shape) else entry.stored(part)
                yield entry.name, name, value, whole

    def fill_states(self, shards: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the optimizer state of each trained weight. Collective over the axes that shard the weights.

        Args:
            shards: weight name → state name → this rank's part of a state that has the weight's shape.
            others: weight name → state name → number, or tensor that is equal on all ranks.
        """
        for entry in self.entries:
            optimizer, updated = self._of[entry.name]
            weight = updated.of(entry)
            parts = shards[entry.name].items()
            whole = {name: updated.whole_state(entry, part, weight.shape) for name, part in parts}
            optimizer.state[weight] = {**whole, **others[entry.name]}

    def _update(self) -> None:
        changed = self._seen != self.model.publications
        for optimizer, updated in self._pairs:
            if changed:
                updated.gather_again()
            updated.step(optimizer)
        self.model.publish()
        self._seen = self.model.publications


def distributed_optimizer(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: DistributedModel,
    *,
    clip_grad_norm: float | None = None,
) -> ModelOptimizer:
    """Wrap an optimizer of `model.parameters()` to update the whole model.

    For a model from `threefold.parallelize`. (Not to be confused with Horovod's `DistributedOptimizer`, in
    `threefold.compat.horovod`, which sums the gradients of a plain module whose loop calls `loss.backward()`.)

    The optimizer updates this rank's shards, so it must treat elements independently, as SGD, Adam, AdamW and Lion do.
    `torch.optim.Muon`, `torch.optim.Adafactor` and classes with the attribute `needs_whole_matrices = True` get whole
    weights instead: every rank that holds a shard of a weight has all of it, with its state, and makes the same update.

    Args:
        optimizer: optimizer of all `model.parameters()`, in any groups (frozen ones may be left out); or several, each
            of some of them, such as Muon for the matrices and AdamW for the rest.
        model: model from `parallelize`.
        clip_grad_norm: maximum global gradient norm over all ranks; None for no clipping.

    Returns:
        an optimizer with `step()` and `zero_grad()`; its `optimizers` are the arguments, for learning-rate schedulers.

    Raises:
        UserError: the optimizer has parameters of another model or lacks some, or needs a closure that computes the
            loss.

    Example:
        >>> optimizer = threefold.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> others = [p for p in model.parameters() if p.dim() != 2]
        >>> both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
        >>> optimizer = threefold.distributed_optimizer(both, model, clip_grad_norm=1.0)
    """
    if not isinstance(model, DistributedModel):
        raise UserError(f"model is a {type(model).__name__} but must be one of threefold.parallelize(); give that.")
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) and optimizer else [optimizer]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise UserError(
                f"optimizer is a {type(each).__name__} but must be a torch.optim.Optimizer of model.parameters(); "
                "make one."
            )
        name = type(each).__name__
        if isinstance(each, torch.optim.LBFGS):
            raise UserError(
                f"optimizer is {name}, which computes the loss several times in a step; use one that takes gradients, "
                "such as AdamW."
            )
        if needs_whole_weights(each) and each.state:
            raise UserError(
                f"optimizer is {name}, which needs whole weights, and has a state of this rank's shards already; pass "
                "it before its first step."
            )
    _check_parameters(optimizers, model)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UserError(f"clip_grad_norm is {clip_grad_norm} but must be above 0; use None for no limit.")
    return ModelOptimizer(optimizers, model, clip_grad_norm)


def needs_whole_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's update of one element depends on other elements of the weight."""
    known = isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)
    return known or bool(getattr(optimizer, "needs_whole_matrices", False))


def _check_parameters(optimizers: Sequence[torch.optim.Optimizer], model: DistributedModel) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = Counter(id(parameter) for each in optimizers for parameter in _parameters(each))
    foreign = given.keys() - names.keys()
    if foreign:
        raise UserError(
            f"optimizer has {len(foreign)} parameters that are none of the model's; make it of model.parameters()."
        )
    trained = {id(weight.master) for weight in model.gradient_step.model.trained}
    left = [name for known, name in names.items() if known in trained and known not in given]
    if left:
        raise UserError(
            f"optimizer lacks {len(left)} of the model's parameters, such as {left[0]!r}; make it of all of "
            "model.parameters()."
        )
    twice = [names[each] for each, count in given.items() if count > 1]
    if twice:
        raise UserError(f"Two optimizers have the parameter {min(twice)!r}; leave it to one of them.")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
