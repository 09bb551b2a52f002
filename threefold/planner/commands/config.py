"""`threefold config schema`, `reference`, `compatibility`, `size` and `presets`: settings, and sizes of models."""

import json

import typer
from typer import Argument

from threefold.files import format_bytes
from threefold.planner.commands.dry_run import print_layout
from threefold.terminal import (
    ConfigFile,
    ModelFile,
    Overrides,
    TrustCode,
    first_to_last,
    print_table,
    read_without_data,
)


def schema() -> None:
    """Print the JSON Schema of configs, for completion and checks in an editor.

    Examples:
      threefold config schema > threefold.schema.json
    """
    from threefold.planner.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def reference() -> None:
    """Print the reference of all settings, as Markdown."""
    from threefold.planner.reference import markdown

    typer.echo(markdown(), nl=False)


def compatibility(
    features: list[str] | None = Argument(
        None, metavar="[FEATURE]...", help="Features to combine, such as zero3 zbv. Default: list all features."
    ),
) -> None:
    """Print whether FEATUREs can be combined and, if not, why and what to use instead; for one, list what it excludes.

    Examples:
      threefold config compatibility zero3 zbv
    """
    from threefold.planner.reference import FEATURES, answers, features_named

    listed = (f"{feature.name}: {feature.title}" for feature in FEATURES)
    for line in answers(features_named(features)) if features else listed:
        typer.echo(line)


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
