"""Checkpoints of Megatron-LM in the commands `threefold checkpoint import` and `export`."""

import re
from pathlib import Path
from typing import Final

import typer

from threefold.convert.megatron_models import LATEST
from threefold.files import format_bytes
from threefold.foreign import FolderFiles
from threefold.output import check_replaceable
from threefold.terminal import Bars, print_table, print_warnings

_CHECKPOINT: Final = re.compile(r"iter_\d{7,9}|release|mp_rank_\d{2,3}(_\d{3})*")


def is_megatron(source: str) -> bool:
    """Return whether a folder is a checkpoint of Megatron-LM, or holds such."""
    folder = Path(source)
    if not folder.is_dir() or FolderFiles(folder).holds("config.json"):
        return False
    names = {path.name for path in folder.iterdir()}
    return LATEST in names or {".metadata", "common.pt"} <= names or any(map(_CHECKPOINT.fullmatch, names))


def import_checkpoint(source: str, out: Path, overwrite: bool, allow_not_finite: bool) -> None:
    """Import a checkpoint, and print what was found."""
    check_replaceable(out, [Path(source)], overwrite)
    from threefold.convert.megatron_import import import_megatron  # imports torch

    with Bars() as bars:
        made = import_megatron(Path(source), out, overwrite, allow_not_finite, bars)
    model = made.config.model
    facts = {
        "from": str(made.checkpoint),
        "family": f"{model.architecture}, of Megatron-LM",
        "after": f"{made.step:,} steps",
        "parameters": f"{made.parameters:,}",
        "layers": f"{model.num_layers} of width {model.hidden_size:,}",
        "vocabulary": f"{model.vocab_size:,} rows, padding included",
        "weights": f"{', '.join(made.dtypes)}, {format_bytes(made.bytes)} in all",
        "optimizer": made.state,
    }
    print_table((str(out), ""), [*facts.items()])
    if made.step:
        typer.echo(f"Next: set data.path in {out / 'config.yaml'}; samples are read on in an order of our own")
        typer.echo(f"      threefold train {out / 'config.yaml'} --run-dir {out} --resume")


def export_checkpoint(
    run: Path, out: Path, dtype: str | None, overwrite: bool, average: bool, step: str | None
) -> None:
    """Export a checkpoint as torch_dist, and print what was written."""
    from threefold.convert.megatron_export import export_megatron  # imports torch

    with Bars() as bars:
        made = export_megatron(run, out, dtype, overwrite, average, step, bars)
    print_warnings(made.warnings)
    facts = {
        "family": f"{made.config.model.architecture}, of Megatron-LM (torch_dist)",
        "after": f"{made.step:,} steps",
        "parameters": f"{made.parameters:,}",
        "weights": made.dtype,
        "optimizer": "left out: load it with --no-load-optim --no-load-rng, or --finetune",
    }
    print_table((str(out), ""), [*facts.items()])
