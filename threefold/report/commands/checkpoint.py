"""`threefold checkpoint`: list, show and verify checkpoints; other rooms add further subcommands."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from threefold.command_line import CommandLine
from threefold.files import counted, format_bytes
from threefold.terminal import AsJson, Bars, print_table, print_warnings, table

if TYPE_CHECKING:
    from threefold.config import Config
    from threefold.report.checkpoints import CheckpointSummary, TensorGroup


app = CommandLine(help="List, show, verify and convert checkpoints; import and export Hugging Face models.")

RunOrCheckpoint = Annotated[
    Path, Argument(metavar="RUN|CHECKPOINT", help="Folder of a run, or of one of its checkpoints.")
]


@app.command("list")
def list_(run: Path = Argument(..., metavar="RUN", help="Run folder."), as_json: AsJson = False) -> None:
    """List the checkpoints of RUN: step, time, size, samples consumed, state, and the layout that wrote each.

    States, found without reading tensors: complete, damaged, partial, or diverged (set aside: its loss is not finite).
    Exit status: 0, even if some are damaged; 2 if RUN is not a run folder.
    """
    from rich.console import Console

    from threefold.checkpoint.folder import best_step, checkpoint_folders
    from threefold.report.checkpoints import listed, locate

    named = locate(run)
    found = [listed(path) for path in checkpoint_folders(named.run)]
    best = best_step(one.facts for one in found if one.facts and one.state == "complete")
    if as_json:
        documents = [{**one.document(), **({"best": True} if one.step == best else {})} for one in found]
        typer.echo(json.dumps(documents, indent=2))
        return
    rows = []
    for one in found:
        samples = f"{one.facts.consumed_samples:,}" if one.facts else "unknown"
        saved = f"{one.saved.astimezone():%Y-%m-%d %H:%M}" if one.saved else "unknown"
        state = "weights only" if one.state == "complete" and one.writer.weights_only else one.state
        is_best = ", best" if one.step == best and one.state == "complete" else ""
        rows.append((f"{one.step:,}", saved, format_bytes(one.bytes), samples, state + is_best, one.layout))
    header = ("step", "saved", "size", "samples", "state", "written by")
    Console().print(table(header, rows, "rlrrll", whole=range(5)))
    for one in found:
        if one.step == best and one.facts and one.facts.measured:
            typer.echo(f"{one.path.name} is the best: its {one.facts.measured[0]} is {one.facts.measured[1]:.4f}.")
        if one.reason:
            typer.echo(f"{one.path.name} is damaged: {one.reason}.")
    if any(one.state == "partial" for one in found):
        typer.echo("A partial checkpoint is being written, or its writing was interrupted; the next save deletes it.")
    together = format_bytes(sum(one.bytes for one in found))
    typer.echo(f"{counted(len(found), 'checkpoint')} in {named.run}, {together}.")
    if good := [one.path for one in found if one.state == "complete"]:
        typer.echo(f"Next: threefold checkpoint show {good[-1]}")


@app.command()
def show(
    path: RunOrCheckpoint,
    pattern: str | None = Argument(
        None, metavar="[PATTERN]", help="Tensors to list: part of a name, or a pattern such as '*.mlp.*'."
    ),
    tensors: bool = Option(False, "--tensors", help="List the tensors: name, shape, dtype, size."),
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint, or of a run's newest good one: run, model, weights and optimizer state.

    Examples:
      threefold checkpoint show runs/run '*.mlp.*'
    """
    from rich.console import Console

    from threefold.report.checkpoints import choose, locate, summarize_checkpoint

    summary = summarize_checkpoint(*choose(locate(path)))
    print_warnings(summary.warnings)
    with_tensors = tensors or pattern is not None
    if as_json:
        typer.echo(json.dumps(summary.document(pattern, with_tensors), indent=2))
    elif with_tensors:
        found = summary.matching(pattern)
        rows = [
            (name, " × ".join(map(str, each.shape)) or "a number", each.dtype_name, format_bytes(each.bytes))
            for name, each in found.items()
        ]
        Console().print(table(("tensor", "shape", "dtype", "size"), rows, "lllr", whole=range(1, 4)))
        total = format_bytes(sum(each.bytes for each in found.values()))
        of = f" of {len(summary.tensors):,}" if len(found) < len(summary.tensors) else ""
        typer.echo(f"{len(found):,}{of} tensors, {total}")
    else:
        _print_summary(summary)


@app.command()
def verify(path: RunOrCheckpoint) -> None:
    """Compare every byte of a checkpoint, or of all checkpoints of a run, with the checksums written with it.

    Exit status: 0 if all match; 1 if one is damaged (a sentence names the file); 2 if there is nothing to verify.
    """
    from threefold.checkpoint.errors import DamagedCheckpoint
    from threefold.report.checkpoints import locate, to_verify, verify_checkpoint

    damaged = False
    for checkpoint in to_verify(locate(path)):
        try:
            with Bars() as bars:
                verified = verify_checkpoint(checkpoint, bars)
        except DamagedCheckpoint as damage:
            damaged = True
            typer.echo(f"Error: {damage}", err=True)
        else:
            typer.echo(
                f"{checkpoint} is as it was written: {verified.tensors:,} tensors, {verified.files:,} files, "
                f"{format_bytes(verified.bytes)}."
            )
    if damaged:
        raise typer.Exit(1)


_STATE_NAMES = {
    "complete": "complete, as far as can be seen without reading tensors (threefold checkpoint verify reads all)",
    "diverged": "diverged: set aside, as the loss after it was not finite; no run resumes from it",
}


def _print_summary(summary: "CheckpointSummary") -> None:
    from threefold.checkpoint.errors import OPTIMIZER
    from threefold.checkpoint.manifest import VERSION

    one, facts, fingerprint = summary.listed, summary.listed.facts, summary.listed.fingerprint
    assert facts is not None  # it could be read
    versions = ", ".join(f"{name} {version}" for name, version in one.writer.versions.items())
    ranks = f", on {counted(one.writer.ranks, 'rank')}" if one.writer.ranks else ""
    rows = [
        ("state", _STATE_NAMES.get(one.state, one.state)),
        ("step", f"{facts.step:,}"),
        ("samples", f"{facts.consumed_samples:,} consumed, in the order of seed {facts.seed}"),
        ("saved", f"{one.saved.astimezone():%Y-%m-%d %H:%M:%S}" if one.saved else "unknown"),
        ("written by", one.layout + (ranks if one.layout not in ("unknown", "imported") else "")),
        *((("versions", versions),) if versions else ()),
        *(_of_config(summary.config) if summary.config else [("config", "none: saved by threefold.save")]),
        ("parameters", f"{summary.weights.elements:,} in {summary.weights.tensors:,} tensors"),
        ("weights", _group(summary.weights)),
        *((("fingerprint", f"{fingerprint}, of the weights, the same in every layout"),) if fingerprint else ()),
        *((f"optimizer {name}", _group(group)) for name, group in summary.states.items()),
        *((("averaged weights", _group(summary.averages)),) if summary.averages.tensors else ()),
        *((("other tensors", _group(summary.others)),) if summary.others.tensors else ()),
    ]
    if not any(name.startswith(OPTIMIZER) for name in summary.tensors):
        rows.append(("optimizer", "no state"))
    if facts.loss_scale is not None:
        rows.append(("loss scale", f"{facts.loss_scale:g}"))
    if facts.tokens:
        rows.append(("data", f"{facts.tokens:,} tokens in {facts.documents:,} documents"))
    data = {chunk.file for tensor in summary.tensors.values() for chunk in tensor.chunks}
    small = ", ".join(name for name in summary.files if name not in data)
    rows.append(("files", f"{len(data):,} of tensors, {format_bytes(one.bytes)} with {small or 'no others'}"))
    rows.append(("format", f"version {VERSION}"))
    print_table(("checkpoint", str(one.path)), rows)


def _of_config(config: "Config") -> list[tuple[str, str]]:
    from threefold.config.by_step import described
    from threefold.config.optimizer import described_groups

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
    batch = f"{described(train.global_batch_size)} sequences of {described(config.data.sequence_length)} tokens"
    return [
        ("model", f"{model.architecture}: {', '.join(parts)}"),
        ("training", f"{config.precision.dtype}, {train.max_steps:,} steps of {batch}"),
        ("optimizer", f"{optimizer.name}, {schedule}"),
        *([("groups", described_groups(optimizer.groups))] if optimizer.groups else []),
    ]


def _group(group: "TensorGroup") -> str:
    return f"{group.tensors:,} × {' and '.join(group.dtypes)}, {format_bytes(group.bytes)}"
