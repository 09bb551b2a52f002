"""What `threefold checkpoint list`, `show`, `verify` and `convert` print."""

from typing import TYPE_CHECKING

import typer

from threefold.byte_sizes import format_bytes
from threefold.cli.data_view import print_table

if TYPE_CHECKING:
    from pathlib import Path

    from threefold.checkpoint.tools.conversion import ConvertedCheckpoint
    from threefold.checkpoint.tools.listing import ListedCheckpoint
    from threefold.checkpoint.tools.summary import CheckpointSummary, TensorGroup
    from threefold.checkpoint.tools.verification import VerifiedCheckpoint
    from threefold.config import Config

_SECOND, _MINUTE = "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M"
_STATE_NAMES = {
    "complete": "complete, as far as is seen without reading tensors (threefold checkpoint verify reads all)",
    "diverged": "diverged: set aside, as the loss after it was not finite; no run resumes from it",
}


def print_list(run: "Path", found: "list[ListedCheckpoint]") -> None:
    """The table of a run's checkpoints, and below it what is wrong with those that are damaged."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, title=None)
    for name, side in (
        ("step", "right"),
        ("saved", "left"),
        ("size", "right"),
        ("samples", "right"),
        ("state", "left"),
    ):
        table.add_column(Text(name), justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(Text("written by"), overflow="fold")
    for one in found:
        samples = f"{one.facts.consumed_samples:,}" if one.facts else "unknown"
        saved = f"{one.saved.astimezone():{_MINUTE}}" if one.saved else "unknown"
        state = "weights only" if one.state == "complete" and one.writer.weights_only else one.state
        cells = (f"{one.step:,}", saved, format_bytes(one.bytes), samples, state, one.layout)
        table.add_row(*map(Text, cells))
    Console().print(table)
    for one in found:
        if one.reason:
            typer.echo(f"{one.path.name} is damaged: {one.reason}.")
    if any(one.state == "partial" for one in found):
        typer.echo("A partial checkpoint is being written, or its writing was interrupted; the next save deletes it.")
    together = format_bytes(sum(one.bytes for one in found))
    number = f"{len(found):,} checkpoint{'s' * (len(found) != 1)}"
    typer.echo(f"{number} in {run}, {together}.")
    if good := [one.path for one in found if one.state == "complete"]:
        typer.echo(f"Next: threefold checkpoint show {good[-1]}")


def print_summary(summary: "CheckpointSummary") -> None:
    """The table of what is in a checkpoint."""
    from threefold.checkpoint.tensor_names import OPTIMIZER

    one, facts = summary.listed, summary.listed.facts
    assert facts is not None  # as it could be read
    versions = ", ".join(f"{name} {version}" for name, version in one.writer.versions.items())
    ranks = f", on {one.writer.ranks} rank{'s' * (one.writer.ranks != 1)}" if one.writer.ranks else ""
    rows = [
        ("state", _STATE_NAMES.get(one.state, one.state)),
        ("step", f"{facts.step:,}"),
        ("samples", f"{facts.consumed_samples:,} consumed, in the order of seed {facts.seed}"),
        ("saved", f"{one.saved.astimezone():{_SECOND}}" if one.saved else "unknown"),
        ("written by", one.layout + (ranks if one.layout not in ("unknown", "imported") else "")),
        *((("versions", versions),) if versions else ()),
        *(_of_config(summary.config) if summary.config else [("config", "none: saved by threefold.save")]),
        ("parameters", f"{summary.weights.elements:,} in {summary.weights.tensors:,} tensors"),
        ("weights", _group(summary.weights)),
        *((f"optimizer {name}", _group(group)) for name, group in summary.states.items()),
        *((("other tensors", _group(summary.others)),) if summary.others.tensors else ()),
    ]
    if not any(name.startswith(OPTIMIZER) for name in summary.tensors):
        rows.append(("optimizer", "no state"))
    if facts.loss_scale is not None:
        rows.append(("loss scale", f"{facts.loss_scale:g}"))
    if facts.tokens:
        rows.append(("data", f"{facts.tokens:,} tokens in {facts.documents:,} documents"))
    data = {name for tensor in summary.tensors.values() for name in (chunk.file for chunk in tensor.chunks)}
    small = ", ".join(name for name in summary.files if name not in data)
    rows.append(("files", f"{len(data):,} of tensors, {format_bytes(one.bytes)} with {small or 'no others'}"))
    rows.append(("format", f"version {summary.version}"))
    print_table(("checkpoint", str(one.path)), rows)


def _of_config(config: "Config") -> list[tuple[str, str]]:
    model, train, optimizer = config.model, config.train, config.optimizer
    heads = f"{model.num_attention_heads} heads" if model.num_attention_heads else ""
    if model.num_key_value_heads and model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} of keys and values)"
    experts = f"{model.num_experts} experts, {model.experts_per_token} active per token" if model.num_experts else ""
    width = f"{model.num_layers} layers of width {model.hidden_size:,}" if model.hidden_size else ""
    parts = [part for part in (width, heads, experts, f"vocabulary {model.vocab_size:,}") if part]
    schedule = f"lr {optimizer.lr:g}, {optimizer.warmup_steps:,} steps of warm-up, {optimizer.decay}"
    if optimizer.decay != "constant":
        schedule += f" until step {optimizer.decay_steps:,} to {optimizer.min_lr:g}"
    batch = f"{train.global_batch_size:,} sequences of {config.data.sequence_length:,} tokens"
    return [
        ("model", f"{model.architecture}: {', '.join(parts)}"),
        ("training", f"{config.precision.dtype}, {train.max_steps:,} steps of {batch}"),
        ("optimizer", f"{optimizer.name}, {schedule}"),
    ]


def print_tensors(summary: "CheckpointSummary", pattern: str | None) -> None:
    """The table of tensors with shape, dtype and bytes, and their sum."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from threefold.checkpoint.tools.summary import bytes_of, dtype_name

    found = summary.matching(pattern)
    table = Table(box=box.SIMPLE)
    table.add_column(Text("tensor"), overflow="fold")
    table.add_column(Text("shape"), no_wrap=True)
    table.add_column(Text("dtype"), no_wrap=True)
    table.add_column(Text("size"), justify="right", no_wrap=True)
    for name, tensor in found.items():
        shape = " × ".join(f"{size}" for size in tensor.shape) or "a number"
        table.add_row(*map(Text, (name, shape, dtype_name(tensor), format_bytes(bytes_of(tensor)))))
    Console().print(table)
    total = format_bytes(sum(map(bytes_of, found.values())))
    of = f" of {len(summary.tensors):,}" if len(found) < len(summary.tensors) else ""
    typer.echo(f"{len(found):,}{of} tensors, {total}")


def print_verified(path: "Path", verified: "VerifiedCheckpoint") -> None:
    """One line about a checkpoint that is as it was written."""
    typer.echo(
        f"{path} is as it was written: {verified.tensors:,} tensors, {verified.files:,} files, "
        f"{format_bytes(verified.bytes)}."
    )


def print_conversion(out: "Path", made: "ConvertedCheckpoint", kind: str) -> None:
    """The table of what was written, and what to do with it."""
    more = f" and {len(made.files) - 1} more" if len(made.files) > 1 else ""
    print_table(
        ("written", str(out)),
        [
            ("from", str(made.checkpoint)),
            ("after", f"{made.step:,} steps"),
            ("format", kind),
            ("parameters", f"{made.parameters:,}, {', '.join(made.dtypes)}"),
            ("tensors", f"{made.tensors:,}, {format_bytes(made.bytes)}"),
            ("files", f"{made.files[0]}{more}" if made.files else "none"),
            ("other files", ", ".join(made.others) or "none"),
        ],
    )


def _group(group: "TensorGroup") -> str:
    return f"{group.tensors:,} × {' and '.join(group.dtypes)}, {format_bytes(group.bytes)}"
