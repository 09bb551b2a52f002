"""What the tests of verifying share: a small task, and a pool whose ranks make a mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.mistakes import Patch, with_mistake
from threefold.comm.layout import LayoutSpec, parse
from threefold.config import Config
from threefold.models.source import ConfigSource, ModelSource
from threefold.verify.batches import RandomBatches
from threefold.verify.layouts import prepare, shrink
from threefold.verify.verifier import LayoutResult, Verification, Verifier
from threefold.verify.worker_pool import WorkerPool

LAYOUTS = ("dp2", "tp2", "pp2", "dp2·tp2·pp2")


def config(**sections: dict[str, Any]) -> Config:
    """A config of a real size, which no test could run as it is."""
    given: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 16, "vocab_size": 50257},
        "data": {"path": "nowhere", "sequence_length": 512},
        "train": {"global_batch_size": 64, "seed": 5},
    }
    for name, settings in sections.items():
        given[name] = {**given.get(name, {}), **settings}
    return Config.model_validate(given)


def task(
    *layouts: str,
    dtype: str = "fp64",
    given: Config | None = None,
    source: ModelSource = ConfigSource(),  # noqa: B008
) -> Verification:
    """Three steps of the config, shrunk for the layouts."""
    specs = [parse(layout) for layout in layouts]
    return Verification(shrink(prepare(given or config(), dtype, vocab_size=50257), specs), 3, RandomBatches(), source)


def verify(pool: Any, todo: Verification, folder: Path, *layouts: str | LayoutSpec) -> list[LayoutResult]:
    """The results of several layouts, every third of which makes the second run, as in the default selection."""
    check = Verifier(todo, pool, folder)
    check.run_one_process()
    specs = [parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    return [check.verify(spec, number % 3 == 0) for number, spec in enumerate(specs)]


class MistakenPool:
    """A pool whose ranks make a mistake in the functions named `only`, or in all: not one process alone, by default."""

    def __init__(self, pool: WorkerPool, mistake: Callable[[], list[Patch]], only: str | None = "run_rank") -> None:
        self.pool, self.mistake, self.only = pool, mistake, only

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if self.only not in (None, fn.__name__):
            return self.pool.run(world_size, fn, *args)
        return self.pool.run(world_size, with_mistake, self.mistake, fn, *args)
