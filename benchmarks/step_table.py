"""Break down the time of a training step by purpose of the operations, with torch's profiler of one process."""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shape
from contest import Contestant, contest
from rich.table import Table
from shape import SHAPES

_PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
_CAUSES = {
    "loss": ("CrossEntropy", "LogitSums", "nll_loss", "log_softmax", "LogSoftmax", "NllLoss"),
    "attention": ("scaled_dot_product", "ScaledDotProduct", "Attention", "aten::bmm", "aten::baddbmm", "softmax"),
    "norms": ("layer_norm", "LayerNorm"),
    "activation function": ("gelu", "Gelu"),
    "embeddings": ("mbedding",),
    "optimizer, norm and clip": ("fused_adam", "linalg_vector_norm", "foreach"),
    "gradients added up": ("AccumulateGrad",),
}  # purpose of operations, by a part of the name of an operation or of one that contains it


def step_table(name: str, dtype: str, steps: int) -> Table:
    """Return the milliseconds of a step by purpose, with matrix products by shape.

    Args:
        steps: number of profiled steps, after as many warm-up steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        contest([Contestant("profiled", profiled_step, (name, dtype, report, steps))], 1, 2 * steps)
        found = json.loads(Path(report).read_text())
    table = Table(title=f"{dtype}: {1000 * found['seconds']:,.1f} ms a step", title_justify="left")
    for heading in ("", "ms", "of the step", "GFLOP/s"):
        table.add_column(heading, justify="right")
    for cause, (seconds, flops) in sorted(found["causes"].items(), key=lambda item: -item[1][0]):
        share = f"{seconds / found['seconds']:.1%}"
        table.add_row(cause, f"{1000 * seconds:,.2f}", share, f"{flops / seconds / 1e9:,.0f}" if flops else "")
    return table


def profiled_step(name: str, dtype: str, report: str, steps: int) -> Callable[[int], None]:
    """Return Threefold's step; steps from the last turn on are profiled, and the purposes written into `report`."""
    from torch.profiler import ProfilerActivity, profile

    of = SHAPES[name]
    step = shape.threefold_step(shape.config(dtype, shape=of), of)
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    first, last = 3 * steps, 4 * steps - 1  # second half of the second of the two turns of `contest`
    began = 0.0

    def observed(number: int) -> None:
        nonlocal began
        if number == first:
            profiler.start()
            began = time.perf_counter()
        step(number)
        if number == last:
            seconds = (time.perf_counter() - began) / steps
            profiler.stop()
            Path(report).write_text(json.dumps({"seconds": seconds, "causes": _causes(profiler, seconds, steps)}))

    return observed


def _causes(profiler: Any, seconds: float, steps: int) -> dict[str, tuple[float, float]]:
    """Return seconds and floating-point operations of a step, by purpose."""
    times: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for event in profiler.events():
        cause = _cause(event)
        times[cause] += event.self_cpu_time_total / 1e6 / steps
        if event.name in _PRODUCTS:
            flops[cause] += _flops(event) / steps
    times["Python"] = max(0.0, seconds - sum(times.values()))
    return {cause: (spent, flops[cause]) for cause, spent in times.items()}


def _cause(event: Any) -> str:
    """Return the purpose of an operation: of the innermost operation around it that has one."""
    if event.name in _PRODUCTS:
        m, k, n = _sizes(event)
        return f"product {m} × {k} × {n}"
    at: Any = event
    while at is not None:
        for cause, names in _CAUSES.items():
            if any(part in at.name for part in names):
                return cause
        if at.name in _PRODUCTS:
            return _cause(at)
        at = at.cpu_parent
    return "other operations"


def _sizes(event: Any) -> tuple[int, int, int]:
    """Return rows, summed dim and columns of a product."""
    first, second = [each for each in event.input_shapes if len(each) == 2][:2]
    if event.name == "mkldnn::_linear_pointwise":
        return first[0], first[1], second[0]
    return first[0], first[1], second[1]


def _flops(event: Any) -> float:
    m, k, n = _sizes(event)
    return 2.0 * m * k * n
