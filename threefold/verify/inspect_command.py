"""`threefold inspect`: the modules of a custom model, and how its plan shards them."""

from pathlib import Path

import typer
from typer import Argument, Option

from threefold.terminal import Overrides, model_file


def command(
    model: str = Argument(..., metavar="FILE.py[:NAME]", help="Python file with a model of your own."),
    config: Path | None = Option(
        None, metavar="CONFIG", help="YAML file with the settings that the model is made from."
    ),
    tp: int = Option(2, min=1, help="Tensor-parallel size for the sizes per rank."),
    overrides: Overrides = None,
) -> None:
    """Print the modules of the model in FILE.py, how its plan shards them, and each rank's share.

    For a model without a plan, prints a proposed one as Python to paste, with question marks where it is undecided.

    Examples:
      threefold inspect model.py:MyModel --tp 4
    """
    from threefold.config.loading import config_of, load_config

    file = model_file(model, "FILE.py")
    assert file is not None  # `model` is given
    custom = {"architecture": "own", "file": file}
    if config is None:
        given = config_of({"model": custom, "data": {"path": "unused"}}, overrides or ())
    else:
        read = load_config(config, overrides or ())
        settings = {key: value for key, value in read.model.settings().items() if key != "preset"}
        given = config_of({**read.sections(), "model": {**settings, **custom}})
    from threefold.config import resolve
    from threefold.data.dataset import USUAL_VOCABULARY
    from threefold.models.source import file_source
    from threefold.verify.inspection import inspect_made

    resolved = resolve(given, given.model.vocab_size or USUAL_VOCABULARY)
    made, plan = file_source(resolved.model).on_meta_device(resolved.model)
    typer.echo(str(inspect_made(made, plan, tp)))
