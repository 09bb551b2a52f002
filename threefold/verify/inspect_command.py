"""`threefold inspect`: the modules of a custom model, and how its plan shards them."""

from functools import partial
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
    from threefold.models.plan import Plan
    from threefold.models.source import complete_plan, file_source
    from threefold.parallel.layout_check import made_on_meta
    from threefold.verify.inspection import inspect_made

    section = resolve(given, given.model.vocab_size or USUAL_VOCABULARY).model
    source = file_source(section)
    factory, plan = source.parts(needs_plan=False)
    make = partial(source.make, factory, section)
    made = made_on_meta(make)
    if plan is not None and not isinstance(plan, Plan):
        plan = complete_plan(plan, make, section, source.path.name)
    typer.echo(str(inspect_made(made, plan, tp)))
