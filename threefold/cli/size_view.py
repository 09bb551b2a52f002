"""What `threefold config size` prints."""

from typing import TYPE_CHECKING

import typer

from threefold.byte_sizes import format_bytes
from threefold.cli.data_view import print_table

if TYPE_CHECKING:
    from threefold.config import Config
    from threefold.plan.model_size import ModelSize


def print_size(size: "ModelSize", config: "Config") -> None:
    """Print the parameters of a model, of its pipeline stages, and the memory of each rank's shards."""
    from threefold.comm.layout import Layout

    layout = Layout.of(config.parallel)
    active = f", {size.active:,} active per token" if size.active < size.parameters else ""
    typer.echo(f"Parameters: {size.parameters:,}{active}.")
    zero = f", zero {config.parallel.zero}" if config.parallel.zero else ""
    typer.echo(f"Layout: {layout}{zero}, {_number(layout.world_size, 'rank')}; {config.precision.dtype}.")
    if layout.pp > 1:
        _print_stages(size)
    _print_ranks(size, layout.pp, layout.world_size // layout.pp)


def _print_stages(size: "ModelSize") -> None:
    rows: list[tuple[str, ...]] = [
        (str(number), str(stage.pp_rank), _run(stage.layers), f"{stage.parameters:,}")
        for number, stage in enumerate(size.stages())
    ]
    print_table(("stage", "pp rank", "layers", "parameters"), rows)


def _print_ranks(size: "ModelSize", pp: int, ranks: int) -> None:
    rows: list[tuple[str, ...]] = []
    for pp_rank in range(pp):
        held = size.largest_rank(pp_rank)
        amounts = (held.weights, held.gradients, held.optimizer, held.bytes)
        rows.append((str(pp_rank), str(ranks), f"{held.parameters:,}", *map(format_bytes, amounts)))
    print_table(("pp rank", "ranks", "parameters", "weights", "gradients", "optimizer", "together"), rows)
    typer.echo("Upper bound per rank during a step; activations and buffers are not included.")


def _run(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"
