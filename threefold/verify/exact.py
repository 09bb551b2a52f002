"""Verification of exact runs: every layout inside the grain has the bits of one process.

`ExactVerifier` starts the ranks; on each, `run_exact_rank` trains and compares every bit with the trace of one process.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.comm.layout import Layout, LayoutSpec
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.exact.tensor_hash import PartHash
from threefold.models.source import ModelSource
from threefold.parallel.layout_check import check_source
from threefold.parallel.parallelize import ChunkSizes
from threefold.parallel.parameter import offset
from threefold.train.step import Engine
from threefold.verify.batches import BatchSource
from threefold.verify.compare import AVERAGE, GRADIENT, INITIAL, LOSS, NORM, WEIGHT, Held
from threefold.verify.layouts import compose
from threefold.verify.products import ProductsTried, try_products
from threefold.verify.rank_worker import CHUNKS, averages_of, make_engine, master_weights, tiny_mesh
from threefold.verify.reference import CLIP_SHARE, Trace
from threefold.verify.verifier import DEPARTS, EQUAL, FAILED, Verdict, Verification, told, user_errors, workers
from threefold.verify.worker_pool import WorkerError, WorkerPool

FINGERPRINT: Final = "fingerprint"
ORDER: Final = (INITIAL, GRADIENT, LOSS, NORM, WEIGHT, AVERAGE, FINGERPRINT)
"""Kinds of compared quantities, in the order in which a step computes them."""


@dataclass(frozen=True)
class Difference:
    """First quantities of a rank whose bits differ from those of one process.

    Attributes:
        what: one of `ORDER`.
        step: from 1; 0 for the initial weights.
        parameter: name of the parameter; empty for loss, norm and the fingerprint of all weights.
        values: the values of one process and of the rank; for a parameter, the number of elements that differ.
    """

    what: str
    step: int
    parameter: str
    rank: int
    values: str

    def __str__(self) -> str:
        """Format as `gradient of blocks.0.mlp.up.weight, step 1 (3 of 96 elements), on rank 2`."""
        of = f" of {self.parameter}" if self.parameter else ""
        when = f", step {self.step}" if self.step else ""
        return f"{self.what}{of}{when} ({self.values}), on rank {self.rank}"


@dataclass(frozen=True)
class ExactResult:
    """Result of comparing the bits of a layout with those of one process.

    Attributes:
        label: the layout, or the number of threads of one process.
        verdict: `equal`, `departs` or `error` (did not run to the end).
        fingerprint: fingerprint of the weights after the last step; empty if the run failed.
        first: first difference: the earliest step, then the earliest of initial weights, gradients, loss, norm, weights
            and their fingerprint, then the first parameter in the order of the model, and the lowest rank.
        ranks: ranks that have this difference.
        details: traceback of an error.
    """

    label: str
    verdict: Verdict
    seconds: float
    fingerprint: str = ""
    first: Difference | None = None
    ranks: tuple[int, ...] = ()
    message: str = ""
    details: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "layout": self.label,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "fingerprint": self.fingerprint or None,
            "first_departure": self.first and asdict(self.first),
            "ranks": list(self.ranks),
            "message": self.message,
        }


class ExactVerifier:
    """Comparison of bits with the single process, layout by layout, on a worker pool.

    Attributes:
        fingerprints: fingerprints of the single process after each step, the initial one first, once
            `run_one_process` has returned.
        parameters: number of elements of the model's parameters.
        unknown_calls: functions that a custom model calls and that are not known to be exact.
    """

    def __init__(self, task: Verification, pool: WorkerPool, folder: Path) -> None:
        self.task, self.pool, self.folder = task, pool, folder
        self.fingerprints: list[str] = []
        self.unknown_calls: list[str] = []
        self.parameters = 0
        self._places: dict[str, int] = {}

    def run_one_process(self) -> None:
        """Check the model, and train it in one process; raises like `Verifier.run_one_process`."""
        task, alone = self.task, compose(self.task.config, LayoutSpec(Layout()))
        with user_errors():
            self.pool.run(1, check_source, task.source, alone)
            [(self.fingerprints, names, self.unknown_calls)] = self.pool.run(
                1, write_exact_trace, task.source, alone, task.rows, task.steps, str(self.folder)
            )
        self._places = {name: place for place, name in enumerate(names)}
        self.parameters = sum(prod(weight.shape) for weight in Trace.load(self.folder).initial.values())

    def try_products(self, config: Config, threads: Sequence[int]) -> ProductsTried:
        """Compare the products of the layers of a whole run, whatever the size of the model that is trained."""
        with user_errors():
            [found] = self.pool.run(1, try_products, self.task.source, config, tuple(threads))
        return found

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the single process after its last step."""
        return self.fingerprints[-1]

    def verify(self, spec: LayoutSpec) -> ExactResult:
        """Train in a layout, and compare its bits."""
        return self._result(str(spec), spec, None)

    def verify_threads(self, threads: int) -> ExactResult:
        """Train in one process with a number of threads, and compare its bits."""
        label = f"1 process, {threads} {'thread' if threads == 1 else 'threads'}"
        return self._result(label, LayoutSpec(Layout()), threads)

    def _result(self, label: str, spec: LayoutSpec, threads: int | None) -> ExactResult:
        task, started = self.task, time.perf_counter()
        arguments = task.source, compose(task.config, spec), task.rows, task.steps, str(self.folder)
        try:
            reports: list[tuple[list[str], list[Difference]]] = self.pool.run(
                spec.world_size, run_exact_rank, *arguments, self.fingerprints, threads
            )
        except WorkerError as error:
            seconds = time.perf_counter() - started
            return ExactResult(label, FAILED, seconds, message=told(error), details=str(error))
        seconds, mine = time.perf_counter() - started, reports[0][0][-1]
        found = [difference for _, differences in reports for difference in differences]
        if not found:
            return ExactResult(label, EQUAL, seconds, mine)

        def time_of(difference: Difference) -> tuple[int, ...]:
            place = self._places.get(difference.parameter, -1)
            return difference.step, ORDER.index(difference.what), place, difference.rank

        first = min(found, key=time_of)
        ranks = (each.rank for each in found if time_of(each)[:3] == time_of(first)[:3])
        return ExactResult(label, DEPARTS, seconds, mine, first, tuple(sorted(ranks)))


@contextmanager
def exact_verifier(task: Verification, ranks: int) -> Iterator[ExactVerifier]:
    """Yield a verifier with workers for up to `ranks` ranks, which end with the block."""
    with workers(ranks, task.full) as (pool, folder):
        yield ExactVerifier(task, pool, folder)


def _steps(
    engine: Engine, config: Config, rows: BatchSource, steps: int
) -> Iterator[tuple[dict[str, Tensor], float, float, str]]:
    """Make steps, and yield the unclipped gradients, loss, gradient norm and fingerprint of the weights of each."""
    dp = engine.mesh.dp
    for step in range(steps):
        loss, tokens = engine.compute_gradients(rows.batch(config, step, dp.index, dp.size), step)
        gradients = {entry.name: entry.gradient.detach().clone() for entry in engine.optimizer.entries}
        result = engine.update(loss, tokens, step)
        yield gradients, result.loss, result.grad_norm, _fingerprint(engine, step + 1)


def _fingerprint(engine: Engine, step: int) -> str:
    found = engine.fingerprint(step)
    assert found is not None  # the run is exact
    return found


def write_exact_trace(
    source: ModelSource, config: Config, rows: BatchSource, steps: int, folder: str
) -> tuple[list[str], list[str], list[str]]:
    """Train in one process with an active clip, and write the trace to `folder`.

    Return the fingerprints of the weights after each step, the initial ones first; the names of the parameters, in
    order; and the functions that the model calls and that are not known to be exact.
    """
    limit = 0.0
    if config.optimizer.clip_grad_norm:
        trial = make_engine(source, config, Mesh(Layout(), in_tree=True), 0.0, ChunkSizes())
        [(_, _, norm, _)] = _steps(trial, config, rows, 1)
        limit = norm * CLIP_SHARE
    engine = make_engine(source, config, Mesh(Layout(), in_tree=True), limit, ChunkSizes())
    trace, hashes = Trace(initial=_copies(master_weights(engine)), limit=limit), [_fingerprint(engine, 0)]
    for gradients, loss, norm, fingerprint in _steps(engine, config, rows, steps):
        trace.losses.append(loss)
        trace.norms.append(norm)
        trace.gradients.append(gradients)
        trace.weights.append(_copies(master_weights(engine)))
        trace.averages.append(_copies(averages_of(engine)))
        hashes.append(fingerprint)
    trace.save(Path(folder))
    return hashes, list(trace.initial), engine.arithmetic.take_notes()


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def run_exact_rank(
    source: ModelSource,
    config: Config,
    rows: BatchSource,
    steps: int,
    folder: str,
    hashes: list[str],
    threads: int | None = None,
) -> tuple[list[str], list[Difference]]:
    """Train as a rank of the config's layout, in tiny chunks, and compare every bit with the trace in `folder`.

    `hashes` are the fingerprints of one process after each step, the initial ones first. Return this rank's, and all
    differences in the first step that has any, in the order of the model.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        mesh, expected = tiny_mesh(config), Trace.load(Path(folder))
        engine = make_engine(source, config, mesh, expected.limit, CHUNKS)
        compared = _Comparison({weight.name: weight.parameter for weight in engine.model.weights}, mesh.rank)
        found = [_fingerprint(engine, 0)]
        compared.tensors(INITIAL, 0, master_weights(engine), expected.initial)
        compared.number(FINGERPRINT, 0, found[0], hashes[0])
        for step, (gradients, loss, norm, fingerprint) in enumerate(_steps(engine, config, rows, steps), 1):
            compared.tensors(GRADIENT, step, gradients, expected.gradients[step - 1])
            compared.number(LOSS, step, loss, expected.losses[step - 1])
            compared.number(NORM, step, norm, expected.norms[step - 1])
            compared.tensors(WEIGHT, step, master_weights(engine), expected.weights[step - 1])
            compared.tensors(AVERAGE, step, averages_of(engine), expected.averages[step - 1])
            compared.number(FINGERPRINT, step, fingerprint, hashes[step])
            found.append(fingerprint)
        return found, compared.differences
    finally:
        torch.set_num_threads(before)


class _Comparison:
    """Comparison of a rank's bits with those of one process, until the end of the first step that differs."""

    def __init__(self, parts: Mapping[str, Tensor], rank: int) -> None:
        self.differences: list[Difference] = []
        self._parts, self._rank = parts, rank

    def tensors(self, what: str, step: int, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Compare this rank's parts of tensors with the whole ones, by the hashes of both."""
        if not self._goes_on(step):
            return
        for name, part in got.items():
            start = offset(self._parts[name])
            of_part = PartHash(part.shape, start, self._parts[name].shape)
            right = Held(name, 0, start, tuple(part.shape)).of(expected[name])
            if int(of_part(part)) != int(of_part(right)):
                values = f"{int((part != right).sum()):,} of {part.numel():,} elements differ"
                self.differences.append(Difference(what, step, name, self._rank, values))

    def number(self, what: str, step: int, got: float | str, expected: float | str) -> None:
        """Compare a number or a fingerprint."""
        if self._goes_on(step) and got != expected:
            self.differences.append(Difference(what, step, "", self._rank, f"{got!r}, not {expected!r}"))

    def _goes_on(self, step: int) -> bool:
        return not self.differences or self.differences[0].step == step
