"""Parallel models for custom training loops (`parallelize`)."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from threefold.api.checkpoint import LoopModel, LoopState
from threefold.api.groups import grouped
from threefold.api.launch import mesh_of_all_ranks
from threefold.checkpoint.code import checksum_of_code
from threefold.comm.mesh import Mesh
from threefold.config import ParallelConfig, PrecisionConfig
from threefold.doors import call_hook, hook
from threefold.dtypes import DTYPES
from threefold.errors import UserError, naming_arguments, require_whole
from threefold.models.custom_batch import joined
from threefold.models.loss_terms import LossFunction, LossSums
from threefold.models.plan import Plan, tying
from threefold.models.sharding import ModelPlan
from threefold.models.source import ObjectSource, error_line
from threefold.parallel.compression import COMPRESSIONS
from threefold.parallel.parallelize import ChunkSizes, TrainingSettings
from threefold.parallel.parameter import publish_
from threefold.parallel.whole_state import LoadedKeys, load_whole_state, on_all_stages, whole_state
from threefold.plugins import require_one_of
from threefold.train.gradient_update import LossScale
from threefold.train.state import model_tensors
from threefold.train.step import GradientStep


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


class DistributedModel(LoopModel):
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

    def __init__(self, gradient_step: GradientStep, unsplit: Callable[[], nn.Module] | None = None) -> None:
        self._unsplit = unsplit  # makes the model that the first step is compared with; None if none is
        self.gradient_step, self.mesh, self.loss_scale = gradient_step, gradient_step.mesh, gradient_step.loss_scale
        self.last = LossSums()
        self.publications = 0
        self.updates = 0
        self.has_gradients = False
        self._compared = set[str]()

    def parameters(self) -> Iterator[Tensor]:
        """Return this rank's shards of the weights for an optimizer; some may be empty; frozen ones lack gradients."""
        return (weight.master for weight in self.gradient_step.model.weights)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of `parameters()` with their names in the whole model."""
        return ((weight.name, weight.master) for weight in self.gradient_step.model.weights)

    def parameter_groups(self, groups: Sequence[Mapping[str, Any]], lr: float | None = None) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer of torch: weights by patterns, as `optimizer.groups` of a config.

        Collective over the world.

        Args:
            groups: mappings with a `match`, a pattern of weights or of modules around them (`*` is any one part of a
                name, `**` several), and with options of the optimizer, such as `weight_decay`, or an `lr_scale`. The
                last one that matches a weight decides.
            lr: learning rate that an `lr_scale` multiplies.

        Returns:
            the weights that no group matches, then those of each group with its options; a rank may have none of some.

        Raises:
            UserError: on every rank, if a group matches no weight that is not another's.

        Example:
            >>> groups = model.parameter_groups([{"match": "**.bias", "weight_decay": 0.0}])
            >>> optimizer = threefold.distributed_optimizer(torch.optim.AdamW(groups, lr=3e-4), model)
        """
        whole = {
            name
            for part in self.mesh.world.gather_objects([name for name, _ in self.named_parameters()])
            for name in part
        }
        return grouped(dict(self.named_parameters()), sorted(whole), groups, lr)

    @overload
    def train_batch(
        self, batch: Any, loss_fn: LossFunction | None = None, *, return_outputs: Literal[False] = False
    ) -> float: ...

    @overload
    def train_batch(
        self, batch: Any, loss_fn: LossFunction | None = None, *, return_outputs: Literal[True, "all"]
    ) -> tuple[float, Any]: ...

    def train_batch(
        self, batch: Any, loss_fn: LossFunction | None = None, *, return_outputs: bool | Literal["all"] = False
    ) -> float | tuple[float, Any]:
        """Run forward and backward passes of a global batch, and sum the gradients over the replicas.

        Collective over the world.

        Args:
            batch: this replica's samples: a tensor, or a tuple, list, mapping or `NamedTuple` of tensors with the
                samples along dim 0. The first layer receives those that the parameters of its `forward` name, or all
                but the last of a tuple. Must be equal on all ranks of the replica, which the first call compares.
            loss_fn: `loss_fn(output, batch)`, called with the last layer's output, returns the mean over the samples of
                a micro-batch, or terms by name (`CountedLoss`). None if the last layer computes the loss from tokens
                and labels.
            return_outputs: whether to return also what the last layer returns for this replica's samples, such as
                logits, without gradients: on the ranks of the last pipeline stage, and None on the others; `"all"`: on
                all ranks of the replica. All micro-batches' outputs are kept in memory until the end of the pass.

        Returns:
            the mean loss of the global batch, the same float on every rank; with `return_outputs`, (loss, outputs).

        Raises:
            UserError: batch, model and loss do not fit together, the batch is another on another rank of the replica,
                or the gradients of the previous batch were not used.
        """
        if self.has_gradients:
            raise UserError(
                "train_batch is called before the optimizer has used the gradients of the batch before, which would be "
                "lost; call optimizer.step() or optimizer.zero_grad() first."
            )
        outputs = _kept(return_outputs, loss_fn)
        self._compare("train_batch", batch)
        check = None
        with _checked(loss_fn):
            if self._unsplit is not None and (verify_loop := hook("verify_loop")) is not None:
                check = verify_loop.begin(self.gradient_step, self._unsplit, batch, loss_fn, self.updates)
            self.last = self.gradient_step.train_batch(batch, self.updates, loss_fn, outputs=outputs)
        if check is not None:
            check.finish(self.last.loss)
        self._unsplit = None
        self.has_gradients = True
        return self.last.loss if outputs is None else (self.last.loss, self._joined(outputs, return_outputs))

    @overload
    def eval_batch(
        self, batch: Any, loss_fn: LossFunction | None = None, *, return_outputs: Literal[False] = False
    ) -> float: ...

    @overload
    def eval_batch(
        self, batch: Any, loss_fn: LossFunction | None = None, *, return_outputs: Literal[True, "all"]
    ) -> tuple[float, Any]: ...

    def eval_batch(
        self, batch: Any, loss_fn: LossFunction | None = None, *, return_outputs: bool | Literal["all"] = False
    ) -> float | tuple[float, Any]:
        """Compute the mean loss of a global batch, without gradients or dropout.

        Collective over the world.

        Args:
            batch, loss_fn, return_outputs: as in `train_batch`.

        Returns:
            the mean loss, the same float on every rank; with `return_outputs`, (loss, outputs).

        Raises:
            UserError: batch, model and loss do not fit together, or the batch is another on another rank of the
                replica.
        """
        outputs = _kept(return_outputs, loss_fn)
        self._compare("eval_batch", batch)
        with _checked(loss_fn):
            self.last = self.gradient_step.eval_batch(batch, loss_fn, outputs)
        return self.last.loss if outputs is None else (self.last.loss, self._joined(outputs, return_outputs))

    def _joined(self, outputs: Mapping[int, Any], where: bool | str) -> Any:
        """Return the outputs of all micro-batches, in order; None where they are not wanted."""
        pp, last = self.mesh.pp, self.gradient_step.parallelism.stages.ranks[-1]
        found = joined([outputs[number] for number in sorted(outputs)]) if pp.index == last else None
        return on_all_stages(found, pp, last, self.mesh.device) if where == "all" else found

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the whole model, with the names and shapes of the unsplit one, on every rank.

        Collective over the world. Weights are in the dtype of the update, a tied weight has all its names, and buffers
        are included if they are persistent, so `MyModel().load_state_dict(model.state_dict())` works. Every rank holds
        the whole model meanwhile; `threefold.save` does not.
        """
        return whole_state(self.gradient_step.model)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadedKeys:
        """Load the state of the whole model; each rank keeps its shards. Collective over the world.

        Args:
            state_dict: the same on every rank; from `state_dict` in any layout, or from the unsplit model.
            strict: whether all names must be there, and no others.

        Returns:
            (missing_keys, unexpected_keys), as `nn.Module.load_state_dict`.

        Raises:
            UserError: shapes differ, or `strict` is set and names are missing or unknown.
        """
        loaded = load_whole_state(self.gradient_step.model, state_dict, strict)
        self.publish()
        return loaded

    def loop_state(self) -> LoopState:
        """Return the state for a checkpoint, which lacks random streams that were drawn from in sequence."""
        step = self.gradient_step
        draws = "The model draws from random streams in sequence, which threefold.save does not keep; use keys."
        return LoopState(
            self.mesh,
            model_tensors(step),
            self.loss_scale,
            "distributed_optimizer",
            {"updates": self.updates},
            step.settings.seed,
            draws if step.streams.used else "",
        )

    def loop_state_filled(self, facts: Mapping[str, Any]) -> None:
        """Take over a checkpoint."""
        self.publish()
        self.updates, self.has_gradients = int(facts.get("updates", 0)), False

    def _compare(self, call: str, batch: Any) -> None:
        """Compare the batch of the first call with those of the other ranks of the replica."""
        if call not in self._compared:
            self._compared.add(call)
            call_hook("require_one_batch", batch, self.mesh, f"In the first {call}")

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
    verify: bool = True,
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
        verify: whether the loss and the gradients of the first `train_batch` are compared with those of one process
            if there are several ranks or micro-batches: some forward and backward passes of the whole model and calls
            of the loss function on the first rank. It then also refuses state that no checkpoint has, and random
            numbers that depend on the layout. Only on CPUs, in fp32 or fp64, and for a model that one process runs in
            seconds; otherwise one line says that the layout was not verified.

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
        parallel=ParallelConfig.model_construct(
            zero=zero,
            zero_shards=zero_shards,
            gradient_compression=gradient_compression,
            schedule=schedule,
            partition=partition,
        ),
        recompute=recompute,
        recompute_every=recompute_every,
        compile=compile,
        chunks=ChunkSizes.of_device(mesh.device.type),
    )
    with naming_arguments():
        try:
            if micro_batches is None and mesh.pp.size > 1:
                accepts, pp = settings.parallel.pipeline_schedule.accepts, mesh.pp.size
                # The fewest that the schedule accepts, or 1 if it accepts none, which it reports itself.
                counts = range(1, _MOST_FOR_A_STAGE * pp + 1)
                settings = replace(settings, micro_batches=next((each for each in counts if accepts(pp, each)), 1))
            files = ObjectSource(model).code_files()
            given = {**vars(plan), "frozen": sorted(plan.frozen)} if isinstance(plan, ModelPlan) else plan
            code = checksum_of_code(files) if files else None
            arguments = {**vars(settings.parallel), **vars(settings), "plan": given, "the code of model": code}
            call_hook("require_same_arguments", "parallelize", arguments)
            scale = LossScale.of(PrecisionConfig(dtype="fp16")) if dtype == torch.float16 else None
            complete = _plan_of(model, plan, made)
            unsplit = tying(made, complete)
            step = GradientStep(unsplit, complete, mesh, settings, loss_scale=scale)
        except ValueError as error:  # unknown schedule
            raise UserError(f"{str(error).rstrip('.')}.") from error
    return DistributedModel(step, unsplit if verify else None)


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


def _kept(return_outputs: Any, loss_fn: Any) -> dict[int, Any] | None:
    """Return an empty collection of outputs if they are wanted; raise UserError if there are none."""
    if return_outputs not in (False, True, "all"):
        raise UserError(f"return_outputs is {return_outputs!r} but must be False, True or 'all'; use True.")
    if return_outputs and loss_fn is None:
        raise UserError(
            f"return_outputs is {return_outputs!r} but without loss_fn the last layer returns the loss alone; give "
            "loss_fn, and have the last layer return what it is computed from."
        )
    return {} if return_outputs else None


def _checked(loss_fn: Any) -> AbstractContextManager[None]:
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(f"loss_fn is {loss_fn!r} but must be a function of the output and the batch; give one.")
    return naming_arguments()
