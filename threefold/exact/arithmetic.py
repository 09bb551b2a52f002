"""The arithmetic of exact runs: sums in pieces that are the same in every layout, added up in one balanced tree."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from threefold.comm.differentiable import reduce_from
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.section import nearest_divisor
from threefold.errors import UserError
from threefold.exact import custom_functions, layers
from threefold.exact.custom import CustomFunctions, UnknownCalls
from threefold.exact.experts import weighted_sum
from threefold.exact.fingerprint import WeightHashes
from threefold.exact.functions import ExactFunctions
from threefold.exact.grain import Grain, Pieces
from threefold.exact.layers import RowSum, last_dim_summed
from threefold.exact.modules import ExactExperts, shardings
from threefold.exact.products import tree_sum
from threefold.exact.sample_sums import ExactShardedGradients, SampleOrder, TreePlace
from threefold.exact.tensor_hash import fingerprint_of
from threefold.exact.totals import row_norms, row_width, sum_exactly
from threefold.models import sharding
from threefold.ops import kernels
from threefold.ops.arithmetic import LayerArithmetic, PassContext
from threefold.ops.cross_entropy import rows_at_once, runs_of_rows
from threefold.parallel.arithmetic import Arithmetic, RankArithmetic
from threefold.parallel.gradients import Gradients, MakePlace
from threefold.parallel.parameter import Weight
from threefold.parallel.shard_modules import feature_units
from threefold.parallel.zero import ShardedGradients, ZeroSharding


@dataclass(frozen=True)
class ExactLayers(LayerArithmetic):
    """Layers whose sums are over pieces; `tensor` is the number of pieces on all tensor ranks."""

    replaces_layers: ClassVar[bool] = True
    fuses_updates: ClassVar[bool] = False

    pieces: Pieces
    tensor: int

    def of_units(self, count: int) -> "ExactLayers":
        ranks = self.tensor // self.pieces.features
        return replace(self, pieces=self.pieces._replace(features=gcd(self.tensor, count) // ranks))

    def feature_parts(self, ranks: int) -> int:
        return self.pieces.features * ranks

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return layers.linear(x, weight, bias, outer=self.pieces.features, rows=self.pieces.all_rows)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return layers.linear(x, weight, None, inner=self.pieces.features, rows=self.pieces.all_rows)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        return layers.add_bias(x, bias, self.pieces.rows)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        context = self.pieces.all_rows.context
        if context == 1:
            return kernels.embedding(ids, table)
        # One sum over each context piece, as where a rank holds it alone.
        return layers.embedding(ids, table, RowSum(context=context), range(len(table)))

    def repeat(self, x: Tensor, times: int) -> Tensor:
        return layers.repeat(x, times)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(x, weights)

    def softmax_sums(self, logits: Tensor, largest: Callable[[Tensor], Tensor], at_once: int) -> tuple[Tensor, Tensor]:
        pieces, wide = self.pieces.features, torch.promote_types(logits.dtype, torch.float32)
        top = largest(logits.amax(1).to(wide))
        buffer = top.new_empty(rows_at_once(logits, at_once), logits.shape[1])
        sums, shift = top.new_empty(pieces, len(logits)), top.unsqueeze(1)
        for rows in runs_of_rows(logits, at_once):
            run = torch.sub(logits[rows], shift[rows], out=buffer[: rows.stop - rows.start])
            sums[:, rows] = last_dim_summed(run.exp_().unflatten(1, (pieces, -1))).squeeze(-1).t()
        return top, tree_sum(sums.unbind())

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return custom_functions.matmul(a, b)

    def matrix_norms(self, x: Tensor) -> Tensor:
        return custom_functions.total(x.square(), (-2, -1), True).sqrt()


class ExactPasses(PassContext):
    """Forward passes in which torch's functions are replaced by those of exact runs."""

    def __init__(self, functions: Callable[[], AbstractContextManager[Any]], calls: UnknownCalls | None) -> None:
        self._functions, self._calls = functions, calls

    def __call__(self) -> AbstractContextManager[Any]:
        return self._functions()

    def ended(self, key: int, outputs: Any) -> None:
        if self._calls is not None:
            self._calls.walk(key, outputs)


class ExactOnRank(RankArithmetic):
    """Part of an exact run's arithmetic on one rank.

    Args:
        order: order of the sums over samples.
        calls: takes note of functions that are not known to be exact; None for this package's models, which have none.
    """

    keeps_whole_logits = separates_uses = ascends = True

    def __init__(
        self, grain: Grain, pieces: Pieces, mesh: Mesh, order: SampleOrder, calls: UnknownCalls | None = None
    ) -> None:
        self._grain, self._mesh, self._order, self._calls = grain, mesh, order, calls
        self._widths: dict[Tensor, int] = {}
        self._hashes: WeightHashes | None = None
        self.layers, self.shardings = ExactLayers(pieces, grain.tensor), shardings(pieces, grain.context)
        functions: Callable[[], AbstractContextManager[Any]]
        if calls is None:
            functions = partial(ExactFunctions, pieces.rows, partial(reduce_from, axis=mesh.cp))
        else:
            functions = partial(CustomFunctions, pieces.rows, calls)
        self.passes = ExactPasses(functions, calls)

    def backward_begins(self, micro_batch: int) -> None:
        self._order.running = micro_batch

    def place(self, senders: int) -> MakePlace:
        return partial(TreePlace, order=self._order, senders=senders)

    def sharded_gradients(
        self, stages: Sequence[nn.Module], zero: ZeroSharding, senders: int, copies: Sequence[tuple[Tensor, Tensor]]
    ) -> ShardedGradients:
        return ExactShardedGradients(stages, zero, self._order, senders, copies)

    def attach(self, modules: Sequence[nn.Module], gradients: Gradients) -> None:
        for module in modules if self._mesh.ep.size > 1 else ():
            if isinstance(module, ExactExperts):
                module.hand_gradients_to(gradients)

    def completes(self, rule: sharding.Split | None) -> bool:
        # The backward passes of norms and biases sum over the ranks themselves, sample by sample.
        return not isinstance(rule, sharding.OverSequence)

    def losses(self, losses: Tensor) -> Tensor:
        wide = losses.double()
        return wide if self._mesh.cp.is_first else torch.zeros_like(wide)  # which all context ranks have

    def squares(self, weights: Sequence[Weight], gradients: Gradients, at_once: int) -> Tensor:
        """Return the squared norm of each row, or piece of a row, which no layout inside the grain cuts further."""
        rows = []
        for weight in weights:
            if weight.leaf not in self._widths:
                self._widths[weight.leaf] = row_width(weight.parameter, self._grain)
            if weight.leaf.numel():
                rows.append(row_norms(gradients[weight.leaf], self._widths[weight.leaf]))
        if not rows:
            return torch.zeros(0, dtype=torch.float64, device=self._mesh.device)
        return torch.cat(rows).double().square_()

    def totals(
        self, values: Sequence[Tensor], counts: Tensor, over_ranks: Callable[[Tensor], list[float]]
    ) -> tuple[list[float], list[float]]:
        return sum_exactly(values, counts, self._mesh.world, over_ranks)

    def fingerprint(self, weights: Sequence[Weight], turn: int) -> str:
        if self._hashes is None:
            self._hashes = WeightHashes(weights, self._mesh)
        return fingerprint_of(self._hashes.take(turn))

    def note(self, call: str) -> None:
        if self._calls is not None:
            self._calls.add(call)

    def take_notes(self, everywhere: bool = True) -> list[str]:
        if self._calls is None:  # on all ranks
            return []
        if not everywhere:
            return self._calls.take_new()
        return sorted({name for names in self._mesh.world.gather_objects(self._calls.take_new()) for name in names})


@dataclass(frozen=True)
class ExactArithmetic(Arithmetic):
    """Arithmetic of an exact run, whose micro-batches are sample groups."""

    is_bitwise: ClassVar[bool] = True

    grain: Grain

    def on_rank(self, mesh: Mesh, micro_batches: int, sequence_parallel: bool, is_custom: bool) -> RankArithmetic:
        pieces = Pieces.of(self.grain, mesh, sequence_parallel)
        order = SampleOrder(micro_batches, self.grain.samples // mesh.dp.size, mesh.cp)
        return ExactOnRank(self.grain, pieces, mesh, order, UnknownCalls() if is_custom else None)

    def check(self, model: nn.Module, plan: sharding.ModelPlan, tp: int) -> None:
        """Raise a `UserError` unless a model's sums can be cut into the grain's pieces on `tp` ranks."""
        check_grain(model, plan, self.grain.tensor, tp)


def exact_arithmetic(config: Config) -> ExactArithmetic:
    """Return the arithmetic of a resolved config with `train.exact`."""
    return ExactArithmetic(Grain.of(config))


def check_grain(model: nn.Module, plan: sharding.ModelPlan, grain: int, tp: int) -> None:
    """Raise a `UserError` unless an exact run can cut a model's sums into `grain` pieces on any number of ranks."""
    placed: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = placed.setdefault(module, name)
        if first != name and any(True for _ in module.parameters(recurse=False)):
            raise UserError(
                f"train.exact is true but {first!r} and {name!r} are one module, whose gradients would add up in "
                "another order on other stages; use two modules, which may share a weight, or train.exact false."
            )
    for name, module in model.named_modules() if tp > 1 else ():
        pattern = plan.patterns.naming(name) if name else None
        rule = None if pattern is None else plan.split[pattern]
        if isinstance(rule, sharding.PerHead) and plan.constructed:
            rule_of = "whose gradients add up in another order on each number of ranks; use parallel.tp 1"
            raise UserError(f"train.exact is true but {pattern!r} is PerHead, {rule_of}.")
        if isinstance(module, nn.Linear) and isinstance(rule, sharding.Column | sharding.Row | sharding.Vocab):
            _require_pieces(str(pattern), feature_units(rule, module), grain, tp)
    for name, parameter in model.named_parameters() if tp > 1 else ():
        rule = plan.split_of(name) if plan.is_standalone(name) else None
        if isinstance(rule, sharding.Sharded) and 1 < parameter.dim() == rule.dim + 1:
            _require_pieces(name, parameter.shape[-1], grain, tp)


def _require_pieces(name: str, count: int, grain: int, tp: int) -> None:
    pieces = gcd(count, grain)
    if pieces % tp:
        raise UserError(
            f"parallel.tp is {tp} but must divide the {pieces} pieces of {name!r}, a power of two that divides its "
            f"{count} features or heads, since train.exact is true; use {nearest_divisor(tp, pieces)}."
        )
