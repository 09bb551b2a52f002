"""Verification from Python (`threefold.verify_model`)."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from threefold.api.trainer import AnyConfig, custom_run
from threefold.data.dataset import vocabulary
from threefold.doors import call_hook
from threefold.errors import UserError, require_whole
from threefold.files import shown
from threefold.launch.process import prepare_fork
from threefold.models.loss_terms import LossFunction
from threefold.parallel.layout_check import layout_check
from threefold.verify.layouts import UNKNOWN_VOCABULARY, asked_for, covering, parse_layouts, possible, prepare, shrink
from threefold.verify.verifier import EQUAL, LayoutResult, Verification, choose_batches, verifier

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class VerifiedModel:
    """Results of `verify_model`; `str()` has a line for each layout.

    Attributes:
        results: results of the layouts, in order.
    """

    results: tuple[LayoutResult, ...]

    @property
    def all_equal(self) -> bool:
        """Whether every layout computes the same as a single process."""
        return all(result.verdict == EQUAL for result in self.results)

    def __iter__(self) -> Iterator[LayoutResult]:
        return iter(self.results)

    def __str__(self) -> str:
        lines = []
        for result in self.results:
            line = f"{result.spec}: {result.verdict}"
            if result.worst is not None:
                line += f", the largest relative error is {result.worst.relative:.1e}"
            if result.first is not None:
                line += f", the first departure is {result.first} ({result.first.where(result.spec.layout)})"
            lines.append(line + (f", {result.message}" if result.message else ""))
        return "\n".join(lines)


def verify_model(
    config: AnyConfig,
    layouts: Sequence[str] | str | None = None,
    *,
    model: Any = None,
    plan: Any = None,
    loss: LossFunction | None = None,
    arguments: Mapping[str, Any] | None = None,
    optimizer: "Callable[..., torch.optim.Optimizer] | None" = None,
    dataset: Any = None,
    ranks: int = 4,
    steps: int = 3,
    dtype: Literal["fp64", "fp32"] = "fp64",
    full: bool = False,
) -> VerifiedModel:
    """Train a few steps in a single process and in each layout, on processes of this host, and compare the results.

    Initial weights, and each step's loss, gradient norm, gradients and updated weights must be equal up to rounding.
    The config's own layout is ignored.

    Args:
        config, model, plan, loss, arguments, optimizer, dataset: as in `Trainer`; classes and functions must be defined
            in a module or the script, where processes look them up. A custom optimizer keeps its `eps`: with 1e-8 Adam
            amplifies gradients that are pure rounding, such as a key bias's, which then differ; use for example
            `functools.partial(torch.optim.NAdam, eps=1e-5)`.
        layouts: layouts such as `["dp2,tp2", "pp2 zero1"]`; None for a selection that covers all kinds of parallelism.
        ranks: number of ranks of the selected layouts.
        steps: optimizer steps to compare.
        dtype: precision; the tolerance is 1e-12 for fp64, 1e-5 for fp32.
        full: whether a model of the config keeps its full size instead of fewer and narrower layers. A custom model on
            data that are not tokens always does.

    Returns:
        a result for each layout.

    Raises:
        UserError: an argument is wrong, the model does not fit its plan, or the data cannot be read.

    Example:
        >>> verified = threefold.verify_model(config, ["dp2,tp2"], model=MyModel, loss=loss, dataset=MyData)
        >>> assert verified.all_equal, verified
    """
    if dtype not in ("fp64", "fp32"):
        raise UserError(f"dtype is {dtype!r} but must be fp64 or fp32; use fp64.")
    require_whole("steps", steps, use=3)
    require_whole("ranks", ranks, least=2, use=4)
    given, source = custom_run(config, model, plan, loss, arguments, optimizer, dataset)
    try:
        pickle.dumps(source)
    except Exception as error:
        raise UserError(
            f"{shown(str(source))} with its plan and loss cannot be sent to other processes "
            f"({' '.join(str(error).split())}); define them at the top of a module or of the script."
        ) from None
    specs = parse_layouts([layouts] if isinstance(layouts, str) else list(layouts or ()))
    call_hook("require_room", max((spec.world_size for spec in specs), default=ranks))
    base = prepare(given, dtype, vocabulary(given) or UNKNOWN_VOCABULARY)
    rows = choose_batches(given, source.loss(base))
    wanted = specs or possible(ranks, given.model.num_experts)
    small = base if full else shrink(base, wanted, batch_alone=rows.is_nested)
    suits = layout_check(source, small)
    selection = asked_for(small, specs, suits) if specs else covering(small, ranks, suits)
    prepare_fork()
    with verifier(Verification(small, steps, rows, source, full), selection) as check:
        check.run_one_process()
        return VerifiedModel(tuple(check.verify(spec, selection.has_second_run(spec)) for spec in selection.specs))
