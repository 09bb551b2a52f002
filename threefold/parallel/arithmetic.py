"""A run's arithmetic: how its layers compute, and in which order gradients, losses and norms are added up.

`Arithmetic` is what a config decides, before there are ranks. It makes `RankArithmetic`, its part on a rank, which
gradients and the training step ask; and the `layers` of that, a `LayerArithmetic` (`ops/arithmetic.py`), are what the
layers multiply and add with. All leave everything to torch; the arithmetic of exact runs, in an attached room, replaces
the methods whose results would depend on the layout. Beyond that, a run asks only whether its arithmetic `is_bitwise`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.doors import needed
from threefold.models.sharding import ModelPlan, Split
from threefold.ops.arithmetic import PLAIN, PLAIN_PASS, LayerArithmetic, PassContext
from threefold.parallel.gradients import Gradients, MakePlace, Place, squared_norm
from threefold.parallel.parameter import Weight
from threefold.parallel.shard_modules import MakeModule
from threefold.parallel.zero import ShardedGradients, ZeroSharding


class RankArithmetic:
    """Arithmetic of a run on a rank, as torch has it.

    Attributes:
        layers: arithmetic of layers that are split over the tensor axis.
        passes: what surrounds forward passes.
        shardings: rules of a plan that are not applied as `SHARDINGS` says.
        keeps_whole_logits: whether a loss is computed from all columns of the logits at once.
        separates_uses: whether the gradients of a tied weight's uses on a rank are summed apart, and then added.
        ascends: whether the backward passes of a stage must go in the order of the micro-batches.
    """

    layers: LayerArithmetic = PLAIN
    passes: PassContext = PLAIN_PASS
    shardings: Mapping[type[Split], MakeModule] = MappingProxyType({})
    keeps_whole_logits: ClassVar[bool] = False
    separates_uses: ClassVar[bool] = False
    ascends: ClassVar[bool] = False

    def backward_begins(self, micro_batch: int) -> None:
        """Take note of the micro-batch whose backward pass, or deferred part of one, runs next."""

    def place(self, senders: int) -> MakePlace:
        """Return what makes a leaf's place in a bucket; `senders` ranks add to a gradient at once."""
        return Place

    def sharded_gradients(
        self,
        stages: Sequence[nn.Module],
        zero: ZeroSharding,
        senders: int,
        copies: Sequence[tuple[Tensor, Tensor]],
    ) -> ShardedGradients:
        """Make the gradients of weights that ZeRO shards; `copies` are those of `TrainableModel`."""
        return ShardedGradients(stages, zero)

    def attach(self, modules: Sequence[nn.Module], gradients: Gradients) -> None:
        """Connect this rank's modules to the gradients, once both are made."""

    def completes(self, rule: Split | None) -> bool:
        """Return whether a backward pass sums the gradients of a rule's whole weights over the tensor ranks itself."""
        return False

    def losses(self, losses: Tensor) -> Tensor:
        """Return this rank's summands of a step's loss, from those of its micro-batches [n]."""
        return losses.sum()

    def squares(self, weights: Sequence[Weight], gradients: Gradients, at_once: int) -> Tensor:
        """Return summands of the squared norm of some gradients: fp64 [n], or a scalar.

        `at_once` adjacent elements are summed in the gradients' own dtype.
        """
        return squared_norm(gradients.joined([weight.leaf for weight in weights]), at_once)

    def totals(
        self, values: Sequence[Tensor], counts: Tensor, over_ranks: Callable[[Tensor], list[float]]
    ) -> tuple[list[float], list[float]]:
        """Sum numbers over all ranks, in the same collective.

        Args:
            values: fp64 [n] or a scalar each, of which each rank may have any number.
            counts: fp64 [m], whole numbers.
            over_ranks: sums fp64 [n] over the ranks.

        Returns:
            the sum of each tensor of `values`, and the sums of `counts`.
        """
        sums = torch.stack([_summed(each) for each in values])
        found = over_ranks(torch.cat([sums, counts]))
        return found[: len(sums)], found[len(sums) :]

    def fingerprint(self, weights: Sequence[Weight], turn: int) -> str | None:
        """Return a hash of all weights if it is the same in every layout, else None; collective over the world.

        Of the ranks that hold an element, the one that hashes it changes with each `turn`.
        """
        return None

    def note(self, call: str) -> None:
        """Take note of a function that may not keep this arithmetic's promise."""

    def take_notes(self, everywhere: bool = True) -> list[str]:
        """Return what was noted since the last call, sorted; `everywhere` on any rank, collective over the world."""
        return []


class Arithmetic:
    """Arithmetic of a run before it has ranks, as torch has it.

    Attributes:
        is_bitwise: whether losses, gradients and weights have the same bits in every layout.
    """

    is_bitwise: ClassVar[bool] = False

    def check(self, model: nn.Module, plan: ModelPlan, tp: int) -> None:
        """Raise a `UserError` unless a whole model, on the meta device, can be computed by `tp` tensor ranks."""

    def on_rank(self, mesh: Mesh, micro_batches: int, sequence_parallel: bool, is_custom: bool) -> RankArithmetic:
        """Return this rank's part; `is_custom` for a model or loss that is not built in."""
        return RankArithmetic()


def arithmetic_of(config: Config) -> Arithmetic:
    """Return the arithmetic that a resolved config asks for."""
    if not config.train.exact:
        return Arithmetic()
    found: Arithmetic = needed("exact_arithmetic", "train.exact", "exact")(config)
    return found


def _summed(values: Tensor) -> Tensor:
    # One by one: the order of torch's sum depends on the number of values.
    if not values.dim():
        return values.double()
    return sum(values[1:], values[0]).double() if len(values) else values.new_zeros((), dtype=torch.float64)
