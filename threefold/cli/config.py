"""`threefold config`: show, compare, size and convert configs."""

import json
from pathlib import Path
from typing import Literal

import typer
from typer import Argument, Option

from threefold.cli.help import CommandLine
from threefold.cli.terminal import (
    ConfigFile,
    ModelFile,
    Overrides,
    TrustCode,
    first_to_last,
    print_layout,
    print_table,
    read_without_data,
    setting_text,
)
from threefold.errors import UserError
from threefold.files import first_of, format_bytes, shown
from threefold.foreign import FolderFiles

app = CommandLine(help="Show, compare, size and convert configs.")


@app.command()
def show(config: ConfigFile, trust_code: TrustCode = False, overrides: Overrides = None) -> None:
    """Check CONFIG against its data and this machine, and print it with every setting resolved.

    The config of a run that names code, such as an own model, is printed as it is stored, and no code runs.

    Examples:
      threefold config show run.yaml --set parallel.tp=2
    """
    from threefold.checkpoint.code import stored_code
    from threefold.config import load_config

    given = load_config(config, overrides or ())
    if not trust_code and (named := stored_code(given, config)):
        typer.echo(given.to_yaml_as_given(), nl=False)
        typer.echo(f"Printed as it is stored: {_unresolved(named)}; --trust-code runs it.", err=True)
        return
    from threefold.launch.training_run import resolve_run

    typer.echo(resolve_run(given).to_yaml_as_given(), nl=False)


@app.command()
def size(
    config: ConfigFile, model: ModelFile = None, trust_code: TrustCode = False, overrides: Overrides = None
) -> None:
    """Print the parameter count of CONFIG's model and the memory of each rank's shards, without starting a rank."""
    resolved = read_without_data(config, overrides, model, trust_code)
    from threefold.comm.layout import Layout
    from threefold.planner.model_size import ModelSize  # imports torch; errors should not wait for it

    found, layout = ModelSize(resolved), Layout.from_config(resolved.parallel)
    active = f", {found.active:,} active per token" if found.active < found.parameters else ""
    typer.echo(f"Parameters: {found.parameters:,}{active}.")
    print_layout(resolved)
    if layout.pp > 1:
        stages = [
            (str(number), str(stage.pp_rank), first_to_last(stage.layers), f"{stage.parameters:,}")
            for number, stage in enumerate(found.stages())
        ]
        print_table(("stage", "pp rank", "layers", "parameters"), stages)
    rows = []
    for pp_rank in range(layout.pp):
        held = found.largest_rank(pp_rank)
        amounts = map(format_bytes, (held.weights, held.gradients, held.optimizer, held.bytes))
        rows.append((str(pp_rank), str(layout.world_size // layout.pp), f"{held.parameters:,}", *amounts))
    print_table(("pp rank", "ranks", "parameters", "weights", "gradients", "optimizer", "together"), rows)
    typer.echo("Upper bound per rank during a step; activations and buffers are not included.")


@app.command()
def presets() -> None:
    """List the presets of published models, the values of `model.preset`, with their sizes.

    Parameters are in billions; the active ones are those that a single token uses. Heads are query heads and,
    if there are fewer, key and value heads.
    """
    from threefold.config import Config, resolve
    from threefold.config.presets import FAMILIES
    from threefold.planner.model_size import ModelSize

    rows = []
    for family in FAMILIES.values():
        for name in family:
            config = resolve(Config.model_validate({"model": {"preset": name}, "data": {"path": "none"}}), vocab_size=0)
            model, found = config.model, ModelSize(config)
            active = f"{found.active / 1e9:.2f}" if found.active < found.parameters else ""
            heads = str(model.num_attention_heads)
            if model.num_key_value_heads not in (0, model.num_attention_heads):
                heads += f"/{model.num_key_value_heads}"
            sizes = (model.num_layers, model.hidden_size, heads, model.vocab_size, model.max_position_embeddings)
            texts = (f"{size:,}" if isinstance(size, int) else size for size in sizes)
            rows.append((name, f"{found.parameters / 1e9:.2f}", active, *texts))
    header = ("preset", "billions", "active", "layers", "hidden", "heads", "vocab", "positions")
    print_table(header, rows)
    typer.echo("Use one with --set model.preset=NAME; settings beside it override its sizes (docs/models.md).")


@app.command()
def convert(
    file: Path = Argument(
        ..., metavar="FILE", help="Fleet YAML, Colossal-AI config.py, or shell script with Megatron-LM flags."
    ),
    kind: Literal["fleet", "colossal", "megatron"] | None = Option(
        None, "--from", help="System that FILE is for. Default: detected from its content."
    ),
    world_size: int | None = Option(
        None, min=1, help="Ranks of the run, where FILE does not set the number of replicas."
    ),
    allow_unsupported: bool = Option(
        False, "--allow-unsupported", help="Leave out settings that have no counterpart, after listing them."
    ),
) -> None:
    """Convert FILE of another system: print the config and, on stderr, the settings that have no counterpart.

    Exit status: 0 if the config can run; 1 if settings such as data.path still have to be set (see its
    first comments); 2 if settings that change the training are unsupported, or the config is invalid.

    Examples:
      threefold config convert pretrain_gpt.sh > run.yaml
    """
    from threefold.convert import convert as converted_from
    from threefold.convert import unmapped_lines

    converted = converted_from(file, kind, world_size)
    typer.echo(converted.to_yaml(), nl=False)
    for line in unmapped_lines(converted, file):
        typer.echo(line, err=True)
    if converted.invalid:
        raise UserError(f"The converted config is invalid: {converted.invalid}")
    if converted.unsupported and not allow_unsupported:
        keys = list(dict.fromkeys(note.key for note in converted.unsupported))
        raise UserError(
            f"{file}: {first_of(keys, 8)} change the training and are unsupported, or are unknown; "
            "give --allow-unsupported to accept the config without them."
        )
    if converted.unset:
        typer.echo(f"The config cannot run as it is: set {' and '.join(converted.unset)}.", err=True)
        raise typer.Exit(1)


@app.command()
def diff(
    first: Path = Argument(..., metavar="A", help="YAML file, or the folder of a run."),
    second: Path = Argument(..., metavar="B", help="YAML file, or the folder of a run."),
) -> None:
    """Print the settings in which two configs differ, including derived settings.

    Where the config of a run names code, such as an own model, no code runs, and both are compared as they are
    stored.

    Exit status: 0 if all settings are equal; 1 if any differs; 2 if one of the configs is invalid.

    Examples:
      threefold config diff run.yaml runs/run
    """
    from threefold.checkpoint.code import stored_code
    from threefold.config import load_config
    from threefold.config.loading import differing_settings

    files = [_stored(path) if path.is_dir() else path for path in (first, second)]
    configs = [load_config(file) for file in files]
    named = [each for config, file in zip(configs, files, strict=True) for each in stored_code(config, file)]
    if named:
        typer.echo(f"Compared as they are stored: {_unresolved(named)}.", err=True)
    else:
        configs = [read_without_data(file, None) for file in files]
    found = differing_settings([config.sections() for config in configs])
    rows = [(name, *map(setting_text, values)) for name, values in found.items()]
    if not rows:
        typer.echo("All settings are equal.")
        return
    print_table(("setting", str(first), str(second)), rows)
    raise typer.Exit(1)


def _unresolved(named: list[tuple[str, str]]) -> str:
    """Return why settings that follow from others are not computed, as a clause."""
    return f"other settings follow from {named[0][0]} {shown(named[0][1])}, code of a run, which is not run"


@app.command()
def schema() -> None:
    """Print the JSON Schema of configs, for completion and checks in an editor.

    Examples:
      threefold config schema > threefold.schema.json
    """
    from threefold.config.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def reference() -> None:
    """Print the reference of all settings, as Markdown."""
    from threefold.config.reference import markdown

    typer.echo(markdown(), nl=False)


@app.command()
def compatibility(
    features: list[str] | None = Argument(
        None, metavar="[FEATURE]...", help="Features to combine, such as zero3 zbv. Default: list all features."
    ),
) -> None:
    """Print whether FEATUREs can be combined and, if not, why and what to use instead; for one, list what it excludes.

    Examples:
      threefold config compatibility zero3 zbv
    """
    from threefold.config.reference import FEATURES, answers, features_named

    listed = (f"{feature.name}: {feature.title}" for feature in FEATURES)
    for line in answers(features_named(features)) if features else listed:
        typer.echo(line)


def _stored(folder: Path) -> Path:
    """Return the path of the config in the folder of a run or a checkpoint."""
    try:
        return FolderFiles(folder).path("config.yaml")
    except OSError as error:
        raise UserError(f"Cannot read the config {shown(folder / 'config.yaml')}: {error.strerror}.") from None
