"""Compiled layers in tests: record what is compiled, and skip code generation."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.parity import Case, Trace, make_engine, shard_of, trained
from threefold.data.loader import Batch


class CompileCounts:
    """Counts of what torch has compiled in this process since the object was created."""

    def __init__(self) -> None:
        self._before = self._now()

    @property
    def graphs(self) -> int:
        """Number of graphs, each with its forward and backward pass."""
        return self._now()["graphs"] - self._before["graphs"]

    @property
    def breaks(self) -> int:
        """Number of places where a function could not be compiled as a whole."""
        return self._now()["breaks"] - self._before["breaks"]

    @staticmethod
    def _now() -> dict[str, int]:
        from torch._dynamo.utils import counters

        return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def traced(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` with compiled graphs run operation by operation, without the slow generation of C++ code.

    Tracing, sharing between layers, differentiation, saved tensors and recompute work as usual.
    """
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        return function(*args)


def operators_of(graph: torch.fx.GraphModule) -> list[str]:
    """Return the package's operators that a compiled graph calls, including those of backward passes, sorted."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [str(node.target) for each in graphs for node in each.nodes if node.op == "call_function"]
    return sorted(target.split(".")[1] for target in targets if target.startswith("threefold."))


def in_layout_counted(case: Case, coded: bool = False) -> tuple[Trace, int, int, int]:
    """Run the engine on this rank, with an evaluation after its first step.

    Returns:
        the trace, the number of graphs compiled in the first step, the number compiled later, and the number of places
        where layers could not be compiled whole.
    """
    if not coded:
        return traced(in_layout_counted, case, True)  # type: ignore[no-any-return]
    counts, engine, first = CompileCounts(), make_engine(case), 0

    def batch_of(step: int) -> Batch:
        return shard_of(case, step, engine.mesh.dp.index)

    def after(step: int) -> None:
        nonlocal first
        if step == 0:
            first = counts.graphs
            engine.evaluate(batch_of(step))

    trace = trained(engine, case.steps, batch_of, after)
    return trace, first, counts.graphs - first, counts.breaks
