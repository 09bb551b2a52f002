"""`threefold verify`: whether layouts compute what one process computes."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from threefold.cli.options import ConfigFile, Overrides

if TYPE_CHECKING:
    from threefold.config import Config
    from threefold.verify.layout_selection import Selection
    from threefold.verify.layout_spec import LayoutSpec


def verify(
    config: ConfigFile,
    named: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LAYOUT]...", help="Such as dp2·tp2·pp2 or tp4,pp2:zbv.", show_default="a selection"),
    ] = None,
    layouts: Annotated[
        list[str] | None, typer.Option("--layouts", "--layout", metavar="LAYOUT", help="The same; `;` between several.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every layout of --ranks ranks that composes.")] = False,
    ranks: Annotated[
        int, typer.Option(min=2, max=1024, help="Ranks of the layouts of the selection and of --all.")
    ] = 8,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Optimizer steps to compare.")] = 3,
    dtype: Annotated[Literal["fp64", "fp32"], typer.Option(help="Precision: equal to 1e-12 or to 1e-5.")] = "fp64",
    full: Annotated[
        bool, typer.Option("--full/--shrink", help="The model as it is, or with fewer and narrower layers.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py[:PLAN]", help="Your own model and its table.", show_default="GPT")
    ] = None,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/verify.md) instead.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also why layouts do not compose, and tracebacks.")
    ] = False,
) -> None:
    """Train CONFIG's model a few steps in one process and in each LAYOUT, and compare everything they compute.

    Initial weights, each step's loss and gradient norm, each parameter's gradient and the weights at the end must be
    equal up to rounding. Ends with status 0 if every layout is equal; 1 if one departs, fails or splits nothing of the
    model over an axis that it has; 2 if it cannot start.
    """
    from threefold.config import load_config
    from threefold.data.vocabulary import vocabulary
    from threefold.launch.process import require_room
    from threefold.verify.layout_selection import possible
    from threefold.verify.layout_spec import parse_layouts
    from threefold.verify.shrunk_config import UNKNOWN_VOCABULARY, prepare, shrink

    given = load_config(config, overrides or ())
    specs = parse_layouts([*(layouts or ()), *(named or ())])
    if specs and every:
        raise typer.BadParameter("give layouts or --all, not both", param_hint="--all")
    require_room(max((spec.world_size for spec in specs), default=ranks))
    base = prepare(given, dtype, vocabulary(given) or UNKNOWN_VOCABULARY)
    small = base if full else shrink(base, specs or possible(ranks, given.model.num_experts))
    selection = _select(small, specs, ranks, every)
    from threefold.cli.verify_view import JsonView, TableView  # these import torch, which errors do not wait for
    from threefold.verify.model_source import ConfigSource, FileSource
    from threefold.verify.verifier import Verification, choose_batches, verifier

    task = Verification(small, steps, choose_batches(given), FileSource.parse(model) if model else ConfigSource(), full)
    view = JsonView(task, selection) if json else TableView(task, selection, base, verbose)
    with verifier(task, selection) as check, view:  # workers are forked before the live line has its thread
        check.run_one_process()
        view.begin(check.shapes)
        for spec in selection.specs:
            view.running(spec)
            view.add(check.verify(spec))
    view.finish()
    if not view.all_equal:
        raise typer.Exit(1)


def _select(config: "Config", specs: "list[LayoutSpec]", ranks: int, every: bool) -> "Selection":
    from threefold.verify import layout_selection

    if specs:
        return layout_selection.asked_for(config, specs)
    return layout_selection.every(config, ranks) if every else layout_selection.covering(config, ranks)
