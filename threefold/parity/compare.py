"""Comparison of two records: every quantity that departs, and where the departure begins.

Quantities are taken in the order in which a step computes them: initial weights, samples, outputs in the order of the
forward pass, loss, output gradients in that of the backward pass, gradients, their norm, learning rates, updates,
optimizer states, buffers. The first quantity that departs is at the mistake, or directly after it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from threefold.errors import UserError
from threefold.files import first_of, shown
from threefold.parity.departure import Findings, phase_of
from threefold.parity.measure import Quantities, Tolerances, last_places
from threefold.parity.record import INITIAL, OUTPUT, Record, align
from threefold.parity.reported import ReportedStep
from threefold.parity.tensors import TensorStep

PRECISIONS: Final = ("bfloat16", "float16", "float32")
"""Dtypes below fp64, the lowest first."""


def compare(
    reference: Record,
    candidate: Record,
    noisy: Sequence[Record] = (),
    steps: int | None = None,
    wide: Record | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Findings:
    """Compare a record with the reference.

    Args:
        noisy: records of the reference, run again with noise in the last place, to learn tolerances.
        steps: number of steps to compare; all by default.
        wide: record of the reference run again in fp64, whose first step says how large rounding is.
        advance: called after each step.

    Raises:
        UserError: the records are of different models or steps, or a file is damaged.
    """
    for other in noisy:
        if not other.facts.get("perturbed"):
            raise UserError(
                f"--noise {shown(other.folder)} is a run without noise, so that it shows no rounding; give records of "
                "the reference run with THREEFOLD_PARITY_PERTURB, as parity run --out keeps them."
            )
    if wide is not None and not noisy:
        raise UserError("--wide goes with --noise; give records of the reference with noise, too.")
    if wide is not None and (problem := wide_problem(reference, wide)):
        raise UserError(f"--wide {shown(wide.folder)} is of no use: {problem}; leave it out.")
    count = _steps(reference, candidate, noisy, steps)
    tolerances = Tolerances(_precision(reference, candidate), len(noisy))
    found = Findings(steps=count)
    before: Quantities | None = None
    places: dict[str, float] = {}
    for step in range(count + 1):
        expected, got = reference.step(step), candidate.step(step)
        if step == 0:
            _check_model(reference, candidate, expected, got)
            ranks = (*reference.ranks, *candidate.ranks)
            dtypes = (item for facts in ranks for item in facts.get("weight_dtypes", {}).items())
            places = last_places(expected.values(), dtypes)
        repeated = [other.step(step) for other in noisy]
        if wide is not None and step == 1:
            in_fp64 = wide.step(step)
            align([expected, got, *repeated, in_fp64])
            TensorStep(step, reference, wide, expected, in_fp64, tolerances).learn(wide=True)
        align([expected, got, *repeated])
        for other, again in zip(noisy, repeated, strict=True):
            if step == 0:
                _check_model(reference, other, expected, again)
            learned = step, reference, other, expected, again, tolerances
            TensorStep(*learned, places=places).learn()
            if step:
                ReportedStep(*learned).learn()
        pair = step, reference, candidate, expected, got, tolerances
        found.departures += TensorStep(*pair, before, places).compare(found)
        if step:
            found.departures += ReportedStep(*pair).compare(found)
        if step == 1:
            outputs = sorted({(each.order, each.name) for each in expected.values() if each.kind == OUTPUT})
            found.order = list(dict.fromkeys(name for _, name in outputs))
        before = expected
        advance()
    found.departures.sort(key=lambda each: (each.step, phase_of(each)))  # stable: within a phase, in its order
    _note(found, reference, candidate)
    return found


def _steps(reference: Record, candidate: Record, noisy: Sequence[Record], wanted: int | None) -> int:
    have = min(each.steps for each in (reference, candidate, *noisy))
    if wanted is not None and wanted > have:
        raise UserError(f"--steps {wanted} but the records have {have} in common; use {have}.")
    if wanted is None:
        for record in (reference, candidate, *noisy):
            planned = record.facts.get("planned_steps", 0)
            if record.steps < planned:
                short = min(record.ranks, key=lambda facts: facts["steps"])
                raise UserError(
                    f"The record {shown(record.folder)} is cut: rank {short['rank']} recorded {short['steps']} of "
                    f"{planned} steps; record the run to their end, or compare fewer: --steps {max(record.steps, 1)}."
                )
        if reference.steps != candidate.steps:
            raise UserError(
                f"The records have {reference.steps} and {candidate.steps} steps; compare what both have with "
                f"--steps {have}."
            )
    if have < 1:
        raise UserError("The records have no step in common; record at least one step of each run.")
    return wanted or have


def _check_model(reference: Record, candidate: Record, expected: Quantities, got: Quantities) -> None:
    names = {name: each.kept.shape for (kind, name, _), each in expected.items() if kind == INITIAL}
    others = {name: each.kept.shape for (kind, name, _), each in got.items() if kind == INITIAL}
    lacking = sorted(set(names) - set(others))
    extra = sorted(set(others) - set(names))
    which = f"{shown(candidate.folder)} is of another model than {shown(reference.folder)}"
    remedy = "compare runs of one model, or let the adapter return the names of the whole one"
    if lacking or extra:
        what = f"it lacks {lacking[0]}" if lacking else f"it has {extra[0]}, which the reference has not"
        more = len(lacking) + len(extra) - 1
        raise UserError(f"The record {which}: {what}{f' ({more} more names differ)' if more else ''}; {remedy}.")
    for name, shape in names.items():
        if shape != others[name]:
            raise UserError(f"The record {which}: {name} has the shape {others[name]} instead of {shape}; {remedy}.")
    for record, quantities in ((reference, expected), (candidate, got)):
        for (kind, name, _), each in quantities.items():
            if kind == INITIAL and each.missing:
                raise UserError(
                    f"The record {shown(record.folder)} has {each.kept.covered:,} elements of {name}, and "
                    f"{each.missing:,} are missing; let every rank record, and the adapter place all its parts."
                )


def wide_problem(reference: Record, wide: Record) -> str:
    """Return why a record cannot be the reference's in fp64, as a clause; empty if it can."""
    if not wide.facts.get("wide"):
        return "it was recorded without THREEFOLD_PARITY_WIDE"
    if any(facts["numbers"].get("1", {}).get("drew_random_numbers") for facts in reference.ranks):
        return "the reference draws random numbers (dropout?), in fp64 others"
    narrow, widened = _precision(reference), _precision(wide)
    order = (*PRECISIONS, "float64")
    if order.index(widened) <= order.index(narrow) and narrow != "float64":
        return f"the model computes in {widened} in spite of fp64 weights and inputs"
    return ""


def _precision(*records: Record) -> str:
    ranks = (facts for record in records for facts in record.ranks)
    dtypes = {dtype for facts in ranks for dtype in (*facts.get("dtypes", ()), *facts.get("activation_dtypes", ()))}
    return next((name for name in PRECISIONS if name in dtypes), "float64")


def _note(found: Findings, reference: Record, candidate: Record) -> None:
    if found.departures and any(
        numbers.get("drew_random_numbers") for facts in candidate.ranks for numbers in facts["numbers"].values()
    ):
        found.notes.append(
            "The forward pass draws random numbers (dropout?), which ranks draw differently in most frameworks: "
            "compare with dropout 0 first."
        )
    if OUTPUT not in found.compared:
        found.notes.append("No module's output was recorded by both, so that only parameters tell where it begins.")
    if found.loose:
        found.notes.append(
            f"Rounding is as large as much of {first_of(sorted(found.loose), 1)}: there only factors and large "
            "mistakes show; compare fewer steps, or in a higher precision."
        )
    if found.skipped and OUTPUT in found.compared:
        found.notes.append(
            f"Outputs of {first_of(sorted(found.skipped), 1, 'modules')} were not compared everywhere: a "
            "record lacks them, or has them in parts, in other shapes or for other samples; an adapter may place them."
        )
    ours, theirs = (record.facts["versions"] for record in (reference, candidate))
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            found.notes.append(f"The runs have different versions of {name}: {ours[name]} and {theirs[name]}.")
    if len(reference.ranks) > 1:
        found.notes.append(f"The reference has {len(reference.ranks)} ranks itself.")
