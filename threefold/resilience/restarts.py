"""Restart the ranks of a training run after a failure: decide whether, how often, and in which layout."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from threefold.checkpoint.resume import has_all_steps
from threefold.comm.layout import Layout, LayoutSpec, parse
from threefold.config import Config
from threefold.config.loading import config_of, problem
from threefold.config.resolve import check_settings
from threefold.config.rules import batch_sizes
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.files import how_often
from threefold.launch.checks import naming_fallback
from threefold.launch.failure import Failure, RankFailed
from threefold.train.attempt import Attempt

COPIES: Final = 2  # number of copies of a rank's state in memory: one stays whole while the other is written


def fallbacks_of(config: Config) -> dict[str, Config]:
    """Return the config as given in each layout of its fallbacks, checked as far as possible without its data.

    A `UserError` names one that is malformed, or cannot train this model with the global batch of the config's layout.
    """
    if not config.parallel.fallbacks:
        return {}
    batch, found = batch_sizes(config, largest=1)["global_batch_size"], {}
    for text in config.parallel.fallbacks:
        with naming_fallback(config, text):
            spec = parse(text)
            found[str(spec)] = _composed(config, spec, batch)
            check_settings(found[str(spec)])
    return found


def _ranks(config: Config) -> int:
    return Layout.from_config(config.parallel).world_size


def in_world(config: Config, fallbacks: Mapping[str, Config], ranks: int, because: str) -> tuple[Config, str]:
    """Return the config for a world of `ranks` ranks, and the fallback it follows, empty if it is the given config.

    Raises a `UserError`, which gives `because` as the source of the number (see `Layout.require_world`), if neither its
    own layout nor a fallback has so many ranks.
    """
    layout = Layout.from_config(config.parallel)
    worlds = {name: _ranks(each) for name, each in fallbacks.items()}
    if (found := next((name for name, size in worlds.items() if size == ranks), None)) is not None:
        return fallbacks[found], found
    if fallbacks:
        listed = ", ".join(f"{name} {size}" for name, size in worlds.items())
        sizes = {layout.world_size, *worlds.values()}
        nearest = min(sizes, key=lambda size: (abs(size - ranks), size))
        what = (
            f"the world has {ranks} ranks, the layout {layout} needs {layout.world_size}, and of the fallbacks {listed}"
            f"; start {nearest} or add a layout of {ranks} ranks"
        )
        raise problem(config, "parallel.fallbacks", what, value=list(config.parallel.fallbacks or ()))
    layout.require_world(ranks, because)
    raise AssertionError


def _composed(config: Config, spec: LayoutSpec, batch: int) -> Config:
    """Return the config in another layout, with a fixed global batch and its parts derived anew."""
    sections = config.given()
    parallel, train, layout = sections["parallel"], sections["train"], spec.layout
    parallel.update({axis: layout.size(axis) for axis in ("dp", "pp", "cp", "tp", "ep")})
    # Settings besides the axes that a layout's text names, or leaves at their default.
    for key in ("cp_method", "schedule", "stage_chunks", "sequence_parallel", "zero", "zero_shards"):
        parallel.pop(key, None)
    if not isinstance(config.parallel.partition, str):  # it lists the stages of one layout
        parallel.pop("partition", None)
    train["global_batch_size"] = batch
    train.pop("gradient_accumulation_steps", None)
    if (micro := train.get("micro_batch_size")) and (batch // layout.dp) % micro:
        train.pop("micro_batch_size")
    for key, value in spec.settings:
        section, name = key.split(".")
        sections[section][name] = value
    origins = {key: origin for key, origin in config.origins.items() if not key.startswith("parallel.")}
    return config_of(sections, origins=origins)


class Restarts:
    """Preparation of the next attempt after a failed one (`Again` of `spawn`), or the error that ends the run.

    The configs are resolved. `began` is `time.time()` at the start of the run; `make` returns the rank arguments of an
    attempt, from its config and itself.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        fallbacks: Mapping[str, Config],
        began: float,
        make: Callable[[Config, Attempt], tuple[Any, ...]],
    ) -> None:
        self._config, self._run_dir, self._fallbacks, self._make = config, run_dir, fallbacks, make
        memory = memory_files(_ranks(config)) if config.train.max_restarts and config.checkpoint.memory_every else ()
        self._attempt = Attempt(most=config.train.max_restarts, began=began, memory=memory)
        self._before: tuple[int, str, int] | None = None  # rank, error and last step, compared with the next failure's

    def args(self) -> tuple[Any, ...]:
        """Return the rank arguments of the current attempt, which is at first the first one."""
        return self._make(self._config, self._attempt)

    def __call__(self, failure: Failure) -> tuple[tuple[Any, ...], int] | None:
        """Return the next attempt's arguments and number of ranks; None if the run is complete.

        Raises a `UserError` if the user has to correct the failure, `RankFailed` if the run is given up.
        """
        message, most = failure.message(self._run_dir), self._attempt.most
        mistake = failure.user_error and not (failure.hardware or failure.of_process)  # of the user
        if mistake or not most:
            raise failure.exception(self._run_dir)
        if has_all_steps(self._run_dir, self._config.train.max_steps):
            return None
        if self._attempt.number >= most:
            raise RankFailed(
                f"{message}; given up, as the ranks were restarted {how_often(most)} (train.max_restarts {most})"
            )
        self._follow(failure, message)
        return self.args(), _ranks(self._config)

    def _follow(self, failure: Failure, message: str) -> None:
        """Choose the next attempt's layout and record this failure; raise `RankFailed` if the next would fail too."""
        known = call_hook("goodput", self._run_dir)
        step = known.step if known else 0
        seen, again, layout = (failure.rank, re.sub(r"\d+", "", failure.error), step), self._before, ""
        # The same rank failed twice in a row: its hardware may be broken.
        if again is not None and again[0] == failure.rank:
            smaller = (name for name, each in self._fallbacks.items() if _ranks(each) < _ranks(self._config))
            if layout := next(smaller, ""):
                self._config, again = self._fallbacks[layout], None
        if again == seen:
            where = f"step {step + 1:,}" if step else "the first step, or the start before it,"
            raise RankFailed(
                f"{message}; given up, as {where} failed in the same way twice in a row with no other step made in "
                "between"
            )
        self._before = None if layout else seen
        self._attempt = replace(
            self._attempt,
            number=self._attempt.number + 1,
            began=time.time(),
            failure=message,
            layout=layout or self._attempt.layout,
            memory=fresh_files(self._attempt.memory) if failure.hardware else self._attempt.memory,
        )


def memory_files(ranks: int) -> tuple[tuple[Path, ...], ...]:
    """Create empty files in memory for the states of `ranks` ranks, `COPIES` for each.

    They exist as long as this process, or another one that opened them, so nothing remains when all are killed. Raises
    a `UserError` on systems without such files.
    """
    if sys.platform != "linux":
        raise UserError("checkpoint.memory_every is not 0 but needs files in memory, which only Linux has; use 0.")
    return tuple(
        tuple(Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'threefold-rank-{rank}')}") for _ in range(COPIES))
        for rank in range(ranks)
    )


def fresh_files(files: tuple[tuple[Path, ...], ...]) -> tuple[tuple[Path, ...], ...]:
    """Close these files, whose states cannot be trusted, and create as many empty ones."""
    for each in files:
        for file in each:
            os.close(int(file.name))
    return memory_files(len(files)) if files else ()
