"""Resume one checkpoint in twelve other layouts, and compare the next ten losses with those of the undisturbed run.

    python benchmarks/resume_layouts.py [--steps 10] [--dtype fp32 fp64]

The checkpoint is of dp 2 · tp 2 · pp 2 with ZeRO 1; layouts with ep resume a model with experts, on dp 4 · tp 2 · ep 2.
Eight local ranks; every layout reads the same samples. For comparison: BLOOM's losses after such a change were 1.94388
(tp 4 · pp 12) and 1.96326 (tp 4 · pp 36) from one checkpoint at equal samples, a difference of 1e-2.
"""

import argparse
import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hardware import hardware_line
from rich.console import Console
from rich.table import Table

from threefold.config import Config, resolve
from threefold.data.dataset import open_dataset
from threefold.train.run import train
from threefold.verify.worker_pool import WorkerPool

SAVED = 10
GOALS = {"fp32": 1e-5, "fp64": 1e-12}
BLOOM = abs(1.96326 - 1.94388) / 1.94388

WRITER = {"dp": 2, "tp": 2, "pp": 2, "zero": 1}
EXPERTS_WRITER = {"dp": 4, "tp": 2, "ep": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp 8": {"dp": 8},
    "tp 8": {"tp": 8},
    "tp 4 · sequence parallel": {"tp": 4, "sequence_parallel": True},
    "pp 8": {"pp": 8},
    "cp 4 · ring": {"cp": 4, "cp_method": "ring"},
    "dp 2 · tp 2 · cp 2, zero 2": {"dp": 2, "tp": 2, "cp": 2, "zero": 2},
    "dp 4 · tp 2, zero 3": {"dp": 4, "tp": 2, "zero": 3},
    "tp 2 · pp 2, interleaved": {"tp": 2, "pp": 2, "schedule": "interleaved"},
    "dp 2 · pp 4, zbv": {"dp": 2, "pp": 4, "schedule": "zbv"},
    "dp 8 · ep 4, zero 1 (experts)": {"dp": 8, "ep": 4, "zero": 1},
    "pp 2 · dp 2 · ep 2 (experts)": {"pp": 2, "dp": 2, "ep": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps after the checkpoint")
    parser.add_argument("--dtype", nargs="+", default=list(GOALS), choices=list(GOALS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, WorkerPool(8) as pool:
        tokens = _tokens(Path(folder) / "tokens")
        found = {dtype: _differences(pool, Path(folder), tokens, dtype, arguments.steps) for dtype in arguments.dtype}
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(_table(found))


def _differences(pool: WorkerPool, folder: Path, tokens: Path, dtype: str, steps: int) -> dict[str, float]:
    """Return the largest relative difference of a step's loss from the undisturbed run, by layout."""
    found: dict[str, float] = {}
    for writer, layouts in (
        (WRITER, {name: layout for name, layout in LAYOUTS.items() if "ep" not in layout}),
        (EXPERTS_WRITER, {name: layout for name, layout in LAYOUTS.items() if "ep" in layout}),
    ):
        original = folder / f"{dtype}-{'-'.join(writer)}"
        expected = _run(pool, original, _config(tokens, dtype, writer, SAVED + steps), resume=False)
        for name, layout in {"the same layout": writer, **layouts}.items():
            copy = folder / "copy"
            step = Path("checkpoints") / f"step_{SAVED:08d}"
            shutil.copytree(original / step, copy / step)
            config = _config(tokens, dtype, layout, SAVED + steps, experts="ep" in writer)
            got = _run(pool, copy, config, resume=True)
            pairs = [(got[number], expected[number]) for number in range(SAVED + 1, SAVED + steps + 1)]
            found[name] = max(abs(one - other) / abs(other) for one, other in pairs)
            shutil.rmtree(copy)
    return found


def _run(pool: WorkerPool, folder: Path, config: Config, resume: bool) -> dict[int, float]:
    parallel = config.parallel
    pool.run(parallel.dp * parallel.tp * parallel.pp * parallel.cp, _rank, config, folder, resume)
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _rank(config: Config, folder: Path, resume: bool) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, folder, resume)


def _config(tokens: Path, dtype: str, layout: dict[str, Any], steps: int, experts: bool | None = None) -> Config:
    model = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8}
    if "ep" in layout if experts is None else experts:
        model |= {"architecture": "llama", "num_experts": 4, "num_key_value_heads": 4}
    given = {
        "model": model,
        "data": {"path": str(tokens), "sequence_length": 64, "split": "90,10"},
        "parallel": layout,
        "train": {"max_steps": steps, "global_batch_size": 16, "eval_every": 0, "device": "cpu"},
        "precision": {"dtype": dtype},
        # With an eps of 1e-8, Adam's first steps would follow the sign of rounding noise.
        "optimizer": {"lr": 1e-3, "eps": 1e-5, "warmup_steps": 2, "decay_steps": 100},
        "checkpoint": {"every": SAVED, "keep": 0},
    }
    config = Config.model_validate(given)
    return resolve(config, open_dataset(config).vocab_size)


def _tokens(folder: Path) -> Path:
    """Write token files of English, from Python's documentation."""
    from threefold.convert.python_text import write_sample
    from threefold.data.preparation import prepare

    write_sample(folder.with_name("text"))
    prepare((folder.with_name("text"),), folder, vocab_size=512, workers=1)
    return folder


def _table(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="Largest relative difference of a loss after resuming", title_justify="left")
    table.add_column("resumed in")
    for dtype in found:
        table.add_column(f"{dtype} (goal {GOALS[dtype]:g})", justify="right")
    for name in next(iter(found.values())):
        values = (each[name] for each in found.values())
        table.add_row(name, *(f"{value:.1e}" if value else "bit-equal" for value in values))
    table.add_row("BLOOM, tp 4 · pp 12 to tp 4 · pp 36", *(f"{BLOOM:.1e}" for _ in found))
    return table


if __name__ == "__main__":
    main()
