"""Dry runs of several ranks of a layout."""

from collections.abc import Iterable

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.models.source import ModelSource
from threefold.plan.dry_run.rank_run import dry_run
from threefold.plan.dry_run.report import DryRunReport


def stage_ranks(config: Config) -> list[int]:
    """The first rank at each place of the pipeline: none of the others there needs more."""
    layout = Layout.of(config.parallel)
    return [layout.rank_of(pp=pp) for pp in range(layout.pp)]


def run_ranks(config: Config, ranks: Iterable[int], source: ModelSource | None = None) -> list[DryRunReport]:
    """`dry_run` of each rank."""
    return [dry_run(config, rank, source) for rank in ranks]
