"""`threefold config schema`, `reference` and `compatibility`: the settings, and which features can be combined."""

import json

import typer
from typer import Argument


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
