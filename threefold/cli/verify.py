"""`threefold verify`: compare layouts with a single process."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from threefold.cli.options import ConfigFile, Overrides, TrustCode, read_config

if TYPE_CHECKING:
    from threefold.comm.layout import LayoutSpec
    from threefold.config import Config
    from threefold.verify.layout_selection import Check, Selection


def verify(
    config: ConfigFile,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LAYOUT]...", help="Layout such as dp2·tp2·pp2 or tp4,pp2:zbv.", show_default="a selection"
        ),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layouts", "--layout", metavar="LAYOUT", help="The same; separate several by `;`."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every valid layout of --ranks ranks.")] = False,
    ranks: Annotated[
        int, typer.Option(min=2, max=1024, help="Ranks of the layouts of the default selection and of --all.")
    ] = 8,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Optimizer steps to compare.")] = 3,
    dtype: Annotated[
        Literal["fp64", "fp32"], typer.Option(help="Precision; the tolerance is 1e-12 for fp64, 1e-5 for fp32.")
    ] = "fp64",
    full: Annotated[
        bool, typer.Option("--full/--shrink", help="Full-size model, or one shrunk to fewer and narrower layers.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE.py[:PLAN]", help="Your own model and its sharding plan.", show_default="GPT"),
    ] = None,
    trust_code: TrustCode = False,
    overrides: Overrides = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document (docs/verify.md) instead of the table.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print why layouts are unsupported, and tracebacks.")
    ] = False,
) -> None:
    """Train CONFIG's model a few steps in a single process and in each LAYOUT, and compare the results.

    Initial weights, and each step's loss, gradient norm, gradients and updated weights must be equal up to rounding; so
    must evaluation, packed documents, a loss scale with an overflow, a skipped step and a resumed run (docs/verify.md).
    Exit status: 0 if every layout is equal; 1 if one differs, fails, or shards nothing over one of its axes; 2 if
    verification cannot start.
    """
    from threefold.comm.layout import parse_layouts
    from threefold.config.model import OWN, is_made_from_section, split_model_file
    from threefold.data.dataset import names_nested_data, vocabulary
    from threefold.launch.process import require_room
    from threefold.verify.layout_selection import possible
    from threefold.verify.shrunk_config import UNKNOWN_VOCABULARY, prepare, shrink

    from_section = model is not None and is_made_from_section(*split_model_file(model))
    given = read_config(config, overrides, None if from_section else model, trust_code)
    nested = names_nested_data(given)
    specs = parse_layouts([*(layouts or ()), *(named or ())])
    if specs and every:
        raise typer.BadParameter("give layouts or --all, not both", param_hint="--all")
    require_room(max((spec.world_size for spec in specs), default=ranks))
    base = prepare(given, dtype, vocabulary(given) or UNKNOWN_VOCABULARY)
    wanted = specs or possible(ranks, given.model.num_experts)
    small = base if full else shrink(base, wanted, batch_alone=nested)
    if given.model.architecture != OWN:
        selection = _select(small, specs, ranks, every)
    from threefold.cli.verify_view import (
        JsonView,
        TableView,
    )  # import torch; the error messages above should not wait for it
    from threefold.models.source import ConfigSource, FileSource
    from threefold.parallel.forward_check import layout_check
    from threefold.verify.verifier import Verification, choose_batches, verifier

    source = FileSource.parse(model) if model is not None and from_section else ConfigSource()
    if given.model.architecture == OWN:
        selection = _select(small, specs, ranks, every, layout_check(source, small))
    task = Verification(small, steps, choose_batches(given, source.loss(small)), source, full, thorough=every)
    view = JsonView(task, selection) if json else TableView(task, selection, base, verbose)
    with verifier(task, selection) as check, view:  # workers are forked before the live line starts its thread
        check.run_one_process()
        view.begin(check.shapes)
        for spec in selection.specs:
            view.running(spec)
            view.add(check.verify(spec, selection.has_second_run(spec)))
    view.finish()
    if not view.all_equal:
        raise typer.Exit(1)


def _select(
    config: "Config", specs: "list[LayoutSpec]", ranks: int, every: bool, check: "Check | None" = None
) -> "Selection":
    """Return the layouts to verify; `check` tests layouts of a model that the config alone does not describe."""
    from threefold.verify import layout_selection

    check = check or layout_selection.suits
    if specs:
        return layout_selection.asked_for(config, specs, check)
    select = layout_selection.every if every else layout_selection.covering
    return select(config, ranks, check)
