"""The answer to a request: the search, the budget, and the config of the best layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from threefold.models.registry import model_plan
from threefold.plan.search.advice import no_layout, none_fits
from threefold.plan.search.bounds.model_costs import ModelCosts
from threefold.plan.search.budget import Budget, budget_of
from threefold.plan.search.costs import Costs, Evaluated
from threefold.plan.search.request import Request
from threefold.plan.search.search import Found, search
from threefold.plan.search.soundness import layout_rules

MakeCosts = Callable[[Request], Costs]


@dataclass(frozen=True)
class SearchAnswer:
    """What was found for a request.

    Attributes:
        request: what was asked.
        found: by the search.
        costs: the cost model.
        usable_bytes: memory of a device that a rank may use.
        seconds: that the search took.
    """

    request: Request
    found: Found
    costs: Costs
    usable_bytes: int
    seconds: float

    @property
    def best(self) -> Evaluated:
        return self.found.ranked[0]

    @property
    def unfit_bytes(self) -> int:
        """What the example of the layouts that do not fit needs; 0 where all fit. The search itself has a bound."""
        misfit = self.found.misfit
        return self.costs.evaluate(misfit.nearest).peak if misfit is not None else 0

    def budget(self, layout: Evaluated) -> Budget | None:
        """What the tokens take in a layout; None where it is not known how many there are."""
        request = self.request
        if request.tokens is None:
            return None
        dollars = request.hardware.dollars_per_hour
        return budget_of(request.tokens, request.tokens_per_step, layout.seconds, layout.choice.gpus, dollars)


def plan_layouts(request: Request, clock: Callable[[], float], make_costs: MakeCosts = ModelCosts) -> SearchAnswer:
    """Search.

    Args:
        request: what to search.
        make_costs: makes the cost model.
        clock: seconds since the request.

    Raises:
        UserError: there is no sound layout, or none fits; says what would make one possible.
    """
    costs = make_costs(request)
    checks = layout_rules(model_plan(request.config.model, request.config.data.sequence_length))

    def run(gpus: int, fixed: Mapping[str, Any]) -> Found:
        counts = [count for count in request.objective.counts(gpus) if request.hardware.fills_nodes(count)]
        return search(request.space(fixed), checks, costs, counts, request.objective)

    found = run(request.gpus, request.fixed)
    if not found.sound:
        raise no_layout(request.gpus, request.fixed, found, run)
    if not found.ranked:
        usable = costs.usable_bytes(request.gpus)
        raise none_fits(request.gpus, request.fixed, request.hardware, usable, found, costs, run)
    return SearchAnswer(request, found, costs, costs.usable_bytes(request.gpus), clock())
