"""Compiled layers in tests without code generation, and the package's operators in a compiled graph."""

from collections.abc import Callable
from typing import Any

import torch


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
