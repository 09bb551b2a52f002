"""One-call distribution of a model, its optimizer and its data loader (`prepare`), in the style of `accelerate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from threefold.api.launch import mesh_of_all_ranks
from threefold.api.model import PRECISIONS
from threefold.comm.axis import Axis
from threefold.comm.differentiable import copy_to, reduce_from
from threefold.comm.mesh import Mesh
from threefold.compat.prepared.gradients import buckets_by_dtype, shard_values
from threefold.compat.prepared.loader import CurrentBatch, PreparedLoader
from threefold.compat.prepared.model import GradSync, PreparedModule
from threefold.compat.prepared.optimizer import PreparedOptimizer, PreparedScheduler, require_matches
from threefold.config import PrecisionConfig
from threefold.dtypes import DTYPES
from threefold.errors import UserError, require_whole
from threefold.models.sharding import Column, Patterns, PerHead, Replicated, Row, Split, Vocab, matches
from threefold.parallel.compression import COMPRESSIONS
from threefold.parallel.context import ShardingContext
from threefold.parallel.gradients import Gradients
from threefold.parallel.leaf import held, local
from threefold.parallel.parameter import in_place_of, is_split, longest_shard, set_in
from threefold.parallel.shard_modules import SHARDINGS, shard_modules
from threefold.parallel.split_layer import SplitLayer
from threefold.parallel.zero import ShardedGradients, make_zero_sharding
from threefold.plugins import require_one_of
from threefold.resilience.agreement import require_same_arguments
from threefold.torch_private.tensors import has_gradient_hooks, has_module_hooks
from threefold.train.gradient_update import LossScale
from threefold.verify.plan_check import has_custom_forward, uncut_tensors

_TAKEN: Final = (Optimizer, DataLoader, LRScheduler, PreparedLoader, PreparedScheduler)


def prepare(
    *objects: Any,
    mesh: Mesh | None = None,
    precision: str = "fp32",
    zero: int = 0,
    accumulate: int = 1,
    compress: str = "none",
    sync_batch_norm: bool = True,
    tensor_parallel: Mapping[str, Split] | None = None,
) -> Any:
    """Make a model, its optimizers, its data loaders and its learning-rate schedules distributed.

    The script's own loop stays as it is, except that `threefold.backward(loss)` replaces `loss.backward()`. Batches,
    losses, gradients and updates equal those of the same script on one process, up to rounding: a `DataLoader` of batch
    size B yields to each replica its part of the same B rows. Collective: every rank makes the same call.

    Every rank starts from the weights and buffers of rank 0. Batch normalization takes its statistics from all rows of
    the global batch; other buffers stay as each rank computes them. A parameter that no replica used has no gradient.
    Dropout draws from each rank's own generator.

    Args:
        objects: any of these, in any order: one `nn.Module`; optimizers of its parameters; `DataLoader`s; schedules
            from `torch.optim.lr_scheduler`. Objects already prepared may be passed again together with new ones, for
            example to add an optimizer or a loader later.
        mesh: mesh of only dp and tp; None for one replica per rank.
        precision: `bf16` or `fp16` computes in that dtype where it is safe (`torch.autocast`), fp16 with dynamic loss
            scaling; weights keep their dtype. `fp32` computes in the dtype of the weights.
        zero: ZeRO stage: 1 shards the optimizer state over the replicas, 2 also gradients, 3 also weights.
        accumulate: backward passes per update (gradient accumulation). `optimizer.step()` does nothing before the last
            of them, or before the loader's last batch.
        compress: gradient compression: sums gradients over the replicas in `fp16` or `bf16`.
        sync_batch_norm: whether batch normalization uses the global batch. If false, each replica uses the statistics
            of its own rows, and after each update takes the running statistics of the first replica.
        tensor_parallel: module name pattern → `Column()`, `Row()`, `Vocab()` …, for a mesh with tp; all other modules
            are replicated on every tensor rank. A model of `ColumnParallelLinear` and the like needs none: it is cut
            already. The fused evaluation of `nn.TransformerEncoderLayer` cannot read
            sharded weights: call `torch.backends.mha.set_fastpath_enabled(False)`.

    Returns:
        the prepared objects in the given order, or the object itself if there is only one.

    Raises:
        UserError: an argument is wrong, or the objects do not belong together.

    Example:
        ```python
        model, optimizer, loader = t3.prepare(model, optimizer, loader, precision="bf16", zero=1, accumulate=4)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            t3.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    given = Preparation(precision, zero, accumulate, compress, sync_batch_norm, tensor_parallel)
    model = _model_among(objects)
    if isinstance(model, PreparedModule):
        if (precision, zero, accumulate, compress) != ("fp32", 0, 1, "none"):
            raise UserError(
                "The model is prepared already, so precision, zero, accumulate and compress are decided; leave them "
                "out."
            )
        mesh, current, before = model.mesh, model.sync.current, model.sync.all_parameters
    else:
        mesh, current = mesh or mesh_of_all_ranks(), CurrentBatch()
        before = {} if model is None else dict(model.named_parameters())
        for axis in ("pp", "cp", "ep"):
            if mesh.layout.size(axis) > 1:
                raise UserError(
                    f"The mesh has {axis} {mesh.layout.size(axis)} but prepare is for dp and tp; use {axis}=1, or "
                    "threefold.parallelize with a plan of the model."
                )
    for each in objects:
        if model is not None and isinstance(each, Optimizer) and not isinstance(each, PreparedOptimizer):
            require_matches(each, before, sharded=zero > 0 or mesh.tp.size > 1)
    if model is not None and not isinstance(model, PreparedModule):
        shapes = {
            name: (tuple(each.shape), each.dtype, each.requires_grad)
            for name, each in before.items()
            if not isinstance(each, nn.parameter.UninitializedParameter)  # which is refused below
        }
        require_same_arguments("prepare", {**vars(given), "the model": shapes})
        model = _prepare_model(model, mesh, current, given)

    def prepared(each: Any) -> Any:
        if isinstance(each, nn.Module):
            return model
        if isinstance(each, PreparedLoader):
            each.currents.append(current)
            return each
        if isinstance(each, DataLoader):
            return PreparedLoader(each, mesh, current)
        if isinstance(each, PreparedOptimizer | PreparedScheduler):
            return each
        assert model is not None  # as `_model_among` says
        if isinstance(each, Optimizer):
            return PreparedOptimizer(each, before, model.sync)
        return PreparedScheduler(each, model.sync)

    made = {id(each): prepared(each) for each in objects}
    results = tuple(made[id(each)] for each in objects)
    return results[0] if len(results) == 1 else results


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor | None:
    """Clip the gradients of a prepared model by the global norm over the whole model, however it is sharded.

    Collective. Call it between `backward` and `optimizer.step()`.

    Args:
        model: model returned by `prepare`.
        max_norm: maximum norm; larger gradients are scaled down to it.

    Returns:
        the norm before clipping, the same on every rank; None, with no effect, while gradients are accumulated.

    Raises:
        UserError: the model is not prepared, or there are no gradients yet.

    Example:
        ```python
        t3.backward(F.cross_entropy(model(x), y))
        t3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        ```
    """
    if not isinstance(model, PreparedModule):
        raise UserError(
            f"model is of the type {type(model).__name__} but clip_grad_norm_ needs the one that prepare returned; for "
            "another, use torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)."
        )
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise UserError(f"max_norm is {max_norm} but must be above 0; use 1.0.")
    return model.sync.clip_global_norm_(float(max_norm))


def _model_among(objects: Sequence[Any]) -> nn.Module | None:
    """Return the model to prepare, or the prepared one; raise UserError if the objects do not belong together."""
    if not objects:
        raise UserError("prepare was called without objects; pass a model, an optimizer or a DataLoader.")
    models = []
    for each in objects:
        if isinstance(each, nn.Module):
            models.append(each)
        elif not isinstance(each, _TAKEN):
            raise UserError(
                f"prepare got an object of the type {type(each).__name__} but takes an nn.Module, optimizers, "
                "DataLoaders and learning-rate schedules; leave it out."
            )
    if len(models) > 1:
        raise UserError(
            f"prepare got {len(models)} models but takes one; call it once for each, or put them into one nn.Module."
        )
    if models:
        return models[0]
    for each in objects:
        if isinstance(each, Optimizer | LRScheduler) and not isinstance(each, PreparedOptimizer):
            raise UserError(
                f"prepare got a {type(each).__name__} without its model; pass the model, or the prepared one, in "
                "the same call."
            )
    return None


@dataclass(frozen=True)
class Preparation:
    """Arguments of `prepare` that decide what it makes of a model, checked."""

    precision: str
    zero: int
    accumulate: int
    compress: str
    sync_batch_norm: bool
    tensor_parallel: Mapping[str, Split] | None

    def __post_init__(self) -> None:
        require_one_of("precision", self.precision, PRECISIONS)
        require_one_of("compress", self.compress, COMPRESSIONS)
        if self.zero not in (0, 1, 2, 3):
            nearest = 3 if isinstance(self.zero, int) else 1
            raise UserError(f"zero is {self.zero!r} but must be 0, 1, 2 or 3; use {nearest}.")
        require_whole("accumulate", self.accumulate)


def _prepare_model(model: nn.Module, mesh: Mesh, current: CurrentBatch, given: Preparation) -> PreparedModule:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise UserError(f"The parameter {name!r} has no values yet; initialise it, or load its weights, first.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("The model has no parameters that require gradients; pass one that is trained.")
    split = {name: module for name, module in model.named_modules() if isinstance(module, SplitLayer)}
    for name, layer in split.items():
        if layer.axis.ranks != mesh.tp.ranks:
            raise UserError(
                f"{name!r} is split over the ranks {layer.axis.ranks} but tp of the mesh has {mesh.tp.ranks}; give "
                "prepare the mesh whose tp the layer was made with."
            )
        if layer.sequence_dim is not None:
            raise UserError(
                f"{name!r} has sequence_dim, with which whole weights get partial gradients; leave it out, or sum them "
                "in a loop of your own, with threefold.parallel.sum_over_shares_."
            )
    if given.tensor_parallel is None and mesh.tp.size > 1 and not split:
        raise UserError(
            f"The mesh has tp {mesh.tp.size} but tensor_parallel names no modules of the model; pass a table such as "
            '{"**.up": Column(), "**.down": Row()}, or use tp=1.'
        )
    model.to(mesh.device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (mesh.dp if is_split(tensor) else mesh.world).broadcast_(held(tensor), 0)
    hooked = {name: each for name, each in model.named_parameters() if has_gradient_hooks(each)}
    patterns, zero = given.tensor_parallel, given.zero
    partial = [] if patterns is None else shard_by_patterns(model, patterns, mesh)
    left = set() if zero and mesh.dp.size > 1 else set(model.parameters())
    lost = next((name for name, each in hooked.items() if each not in left or is_split(each)), None)
    if lost is not None:
        cut = f"zero {zero}" if not left else f"tp {mesh.tp.size}"
        raise UserError(
            f"The parameter {lost!r} has a gradient hook, which would see the gradient of a shard with {cut}; change "
            "gradients in the optimizer, or the computation in forward."
        )
    norms = [module for module in model.modules() if isinstance(module, _NORMS)]
    if given.sync_batch_norm and mesh.dp.size > 1 and norms:
        # A separate process group, because gradient sums may be in flight over dp.
        axis = mesh.new_axis("batch norm", mesh.layout.groups("dp"))
        assert axis is not None  # each rank is in one of them
        made: dict[nn.Module, nn.Module] = {norm: GlobalBatchNorm(norm, axis, current) for norm in norms}
        for name, norm in list(model.named_modules(remove_duplicate=False)):
            if norm in made and (has_module_hooks(norm) or type(norm).forward is not _NORMS[0].forward):
                changed = "a hook" if has_module_hooks(norm) else "a forward of its own"
                raise UserError(
                    f"{name!r} is a {type(norm).__name__} with {changed}, which batch normalization over the global "
                    "batch would not have; use sync_batch_norm=False."
                )
            if norm in made and name:
                set_in(model, name, made[norm])
        model = made.get(model, model)
    buffers = [] if given.sync_batch_norm else [buffer for module in norms for buffer in module.buffers()]
    wire, precision = DTYPES.get(given.compress), given.precision
    sharding = make_zero_sharding(mesh, zero, mesh.dp.size) if mesh.dp.size > 1 else None
    if sharding is not None:
        shard_values(model, sharding, wire, mesh.tp)
        gradients: Gradients = ShardedGradients([model], sharding)
    else:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        longest = {local(parameter): longest_shard(parameter) for parameter in trained}
        gradients = buckets_by_dtype(longest, mesh.dp, wire, longest, mesh.tp)
    # The window of `torch.amp.GradScaler`, whose loop this replaces.
    scale = LossScale.of(PrecisionConfig(dtype="fp16", loss_scale_window=2000)) if precision == "fp16" else None
    parameters, sharded = dict(model.named_parameters()), None if sharding is None else model
    sync = GradSync(parameters, partial, gradients, mesh, given.accumulate, scale, current, sharded, buffers)
    return PreparedModule(model, sync, mesh, None if precision == "fp32" else DTYPES[precision])


_RULES = (Column, Row, Vocab, PerHead, Replicated)


def shard_by_patterns(model: nn.Module, table: Mapping[str, Split], mesh: Mesh) -> list[str]:
    """Replace the modules that a table names by parallel ones, in place; return the `PerHead` parameters' names.

    The weights are equal on every tensor rank. A module that infers its number of heads from its projections' outputs
    (`view(…, -1, head_dim)`, as in `transformers`) then works on the heads of its rank. Each tensor rank holds a whole
    `PerHead` parameter and a partial gradient. The table has `Column` or `Row` for an `nn.Linear`, and `Vocab` for an
    `nn.Embedding` or an `nn.Linear` that computes logits, which are gathered.
    """
    for pattern, rule in table.items():
        if not isinstance(rule, _RULES):
            raise UserError(
                f"tensor_parallel has {rule!r} for {pattern!r} but takes "
                f"{', '.join(f'{kind.__name__}()' for kind in _RULES)}; use one of them."
            )
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for name in modules if name]
    for pattern in table:
        if not any(matches(name, pattern) for name in names):
            last = {name.rpartition(".")[2]: name for name in reversed(names)}
            close = get_close_matches(pattern.rpartition(".")[2], last, n=1, cutoff=0)
            hint = f"; the nearest is {last[close[0]]!r}" if close else ""
            raise UserError(f"tensor_parallel has {pattern!r}, which is not a module of the model{hint}.")
    patterns = Patterns(table)
    rules = {name: table[found] for name in names if (found := patterns.naming(name)) is not None}
    for name, rule in rules.items():
        _check_rule(name, modules, rule, mesh.tp.size)
    if mesh.tp.size == 1:
        return []
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    ties = [each for each in users.values() if len(each) > 1]
    for tied in ties:
        given = {name: rules.get(name.rpartition(".")[0]) for name in tied}
        if len({type(rule) for rule in given.values()}) > 1:
            one = next(name for name, rule in given.items() if rule is not None)
            others = " and ".join(repr(name) for name in tied if name != one)
            raise UserError(
                f"tensor_parallel has a rule for {one!r}, the same weight as {others}; give their modules one rule."
            )
    standalone = {name: Replicated() for name, _ in model.named_parameters(recurse=False)}
    shard_modules([model], {"**": Replicated(), **rules}, ShardingContext(mesh.tp, mesh.cp, mesh.ep), standalone)
    for first, *others_of in ties:
        for user in others_of:
            set_in(model, user, model.get_parameter(first))
    per_head = [name for name, rule in rules.items() if isinstance(rule, PerHead)]
    return [f"{name}.{each}" for name in per_head for each, _ in modules[name].named_parameters()]


def _check_rule(name: str, modules: Mapping[str, nn.Module], rule: Split, ranks: int) -> None:
    module = modules[name]
    kinds = SHARDINGS[type(rule)].kinds
    if not isinstance(module, kinds):
        suits = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(
            f"tensor_parallel has {type(rule).__name__}() for {name!r}, a {type(module).__name__}, but that rule is "
            f"for {suits}; leave it out to keep the module whole."
        )
    if isinstance(rule, PerHead | Replicated):
        return
    said = f"tensor_parallel has {type(rule).__name__}() for {name!r}, a {type(module).__name__}"
    if has_custom_forward(module):
        raise UserError(
            f"{said} with a forward of its own, which a cut layer would not have; leave it out, or name the module "
            "inside it."
        )
    if foreign := uncut_tensors(module, rule):
        raise UserError(f"{said} with the {foreign[0]}, which that rule does not cut; leave it out.")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq" if not module.sparse else "sparse"
        raise UserError(f"{said} with {option}, which a cut table does not have; make the embedding without it.")
    if has_module_hooks(module) and ranks > 1:
        raise UserError(
            f"{said} with a hook, which would see a part of the features with tp {ranks}; register it on a module "
            "around it that is not cut."
        )
    if not isinstance(module, nn.Linear) or isinstance(rule, Vocab):
        return
    if module is getattr(modules[""], "get_output_embeddings", lambda: None)():
        raise UserError(
            f"tensor_parallel has {type(rule).__name__}() for {name!r}, which gives the model's logits; use Vocab(), "
            "which gathers them."
        )
    features = module.out_features if isinstance(rule, Column) else module.in_features
    width = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
    if isinstance(width, int) and width > 0 and features % width == 0:
        heads = features // width
        if heads % ranks:
            fits = max(each for each in range(1, ranks) if heads % each == 0)
            raise UserError(f"The mesh has tp {ranks} but it must divide the {heads} heads of {name!r}; use tp={fits}.")


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class GlobalBatchNorm(nn.Module):
    """`nn.BatchNorm1d`, `2d` or `3d` with the statistics of the global batch in training.

    The axis of the replicas has its own process group, because gradients may be in flight on another. The current
    batch's row on this replica may be a filler, which must not count.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, module: Any, axis: Axis, current: CurrentBatch) -> None:
        super().__init__()
        self.axis, self._current = axis, current
        self.eps, self.momentum = module.eps, module.momentum
        self.track_running_stats = module.track_running_stats
        self.weight, self.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(module, name))
        in_place_of(self, module)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, …], this replica's rows, over N and the dims after C."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        counts = 0.0 if self._current.is_filler else 1.0
        size = wide.new_full((1,), counts * x.numel() / x.shape[1])
        totals = self._over_replicas(torch.cat([wide.sum(dims) * counts, size]))
        number = totals[-1].detach()
        mean = totals[:-1] / number
        offset = wide - mean.view(shape)
        variance = self._over_replicas(offset.square().sum(dims) * counts) / number
        tracked = self.num_batches_tracked
        if self.training and self.running_mean is not None and self.running_var is not None and tracked is not None:
            with torch.no_grad():
                tracked.add_(1)
                factor = 1.0 / float(tracked) if self.momentum is None else self.momentum
                unbiased = variance * (number / (number - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        out = offset * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    def _over_replicas(self, x: Tensor) -> Tensor:
        """Sum over the replicas; the backward pass sums too, since every replica's loss depends on the result."""
        return copy_to(reduce_from(x, self.axis), self.axis)
