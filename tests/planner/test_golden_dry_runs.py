"""Bytes, operations and collectives of fourteen layouts are those that were kept: a change of sharding is a diff.

After an intended change, record anew with `python -m tests.planner.test_golden_dry_runs`.
"""

from pathlib import Path
from unittest.mock import patch

from tests.planner.golden_collectives import LAYOUTS
from tests.support.sweep import sweep
from threefold.cpu import kernels
from threefold.planner.dry_run import run_ranks, stage_ranks
from threefold.planner.dry_step import DryRunReport

FILE = Path(__file__).parent / "data" / "dry_runs.txt"
NAMES = (
    "dp2",
    "tp2",
    "tp2, sequence parallel, dropout",
    "pp2, 1f1b",
    "pp2 tp2, interleaved",
    "pp2 dp2, zbv",
    "cp2, all-gather",
    "dp3, ZeRO 1",
    "dp2 tp2, ZeRO 2, untied, bf16",
    "dp2 pp2, ZeRO 3",
    "dp2 tp2 pp2, sequence parallel, recompute",
    "Llama, tp2 pp2, tied, ZeRO 1",
    "mixture, ep2",
    "mixture, ep2 pp2 cp2, zero-bubble",
)
"""Names of layouts in `golden_collectives`."""


def table(name: str) -> list[str]:
    """Return the lines of a layout: bytes and operations of each stage, then its collectives.

    Uses oneDNN's matrix products on any processor: they need more memory.
    """
    config = LAYOUTS[name].config
    with patch.object(kernels, "_MKL_IS_FAST", False):
        return [f"[{name}]", *(line for report in run_ranks(config, stage_ranks(config)) for line in _lines(report))]


def _lines(report: DryRunReport) -> list[str]:
    amounts = {
        "parameters": report.parameters,
        "weights": report.parameter_bytes,
        "gradients": report.gradient_bytes,
        "optimizer": report.optimizer_bytes,
        "activations": report.activation_bytes,
        "peak": report.peak_bytes,
        "operations": report.flops,
    }
    collectives = {f"{each.axis} {each.operation}": (each.count, each.nbytes) for each in report.collectives}
    return [
        f"rank {report.rank}: {report.layers[0]} to {report.layers[-1]}",
        *(f"  {name:<28}{amount:>20,}" for name, amount in amounts.items()),
        *(f"  {name:<28}{nbytes:>20,} in {count:,}" for name, (count, nbytes) in sorted(collectives.items())),
    ]


def read() -> dict[str, list[str]]:
    tables = FILE.read_text(encoding="utf-8").strip().split("\n\n")
    return {lines[0].strip("[]"): lines for lines in (each.split("\n") for each in tables)}


@sweep("name", NAMES, quick=(4, 8), slow=slice(0, None, 2))
def test_a_layout_needs_what_the_table_says(name: str) -> None:
    assert table(name) == read()[name], "python -m tests.planner.test_golden_dry_runs writes the tables anew"


def test_the_file_holds_these_layouts_and_no_others() -> None:
    assert tuple(read()) == NAMES
    assert all(sum(line.startswith("rank ") for line in lines) >= 1 for lines in read().values())
    assert FILE.stat().st_size < 50_000


if __name__ == "__main__":
    FILE.write_text("\n\n".join("\n".join(table(name)) for name in NAMES) + "\n", encoding="utf-8")
