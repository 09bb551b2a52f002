"""The comparison of two records: every quantity that departs, and where the departure begins.

Quantities are taken in the order in which a step computes them: initial weights, samples, outputs in the order of the
forward pass, loss, output gradients in that of the backward pass, gradients, their norm, learning rates, updates,
optimizer states, buffers. The first that departs is where the mistake is, or right behind it.
"""

from collections.abc import Callable, Sequence

from threefold.errors import UserError
from threefold.files import shown
from threefold.parity.departure import Findings, phase_of
from threefold.parity.measure import Quantities, Tolerances, last_places
from threefold.parity.record import INITIAL, OUTPUT, Record
from threefold.parity.reported import ReportedStep
from threefold.parity.tensors import TensorStep


def compare(
    reference: Record,
    candidate: Record,
    noisy: Sequence[Record] = (),
    steps: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Findings:
    """Compare a record with the reference.

    Args:
        reference: record of the run that is right, such as of one process.
        candidate: record of the other.
        noisy: records of the reference run again with noise in the last place, from which tolerances are learned.
        steps: number of steps to compare; all by default.
        advance: called after each step.

    Raises:
        UserError: the records are of different models or steps, or a file is damaged.
    """
    count = _steps(reference, candidate, noisy, steps)
    tolerances = Tolerances(_precision(reference, candidate), len(noisy))
    found = Findings(steps=count)
    before: Quantities | None = None
    for step in range(count + 1):
        expected = reference.step(step)
        got = candidate.step(step)
        if step == 0:
            _check_model(reference, candidate, expected, got)
        for other in noisy:
            again = other.step(step)
            TensorStep(step, reference, other, expected, again, tolerances).learn()
            if step:
                ReportedStep(step, reference, other, expected, again, tolerances).learn()
        if step == 0:
            dtypes = {dtype for record in (reference, candidate) for facts in record.ranks for dtype in facts["dtypes"]}
            places = last_places(expected.values(), dtypes)
        tensors = TensorStep(step, reference, candidate, expected, got, tolerances, before, places)
        found.departures += tensors.compare(found)
        if step:
            reported = ReportedStep(step, reference, candidate, expected, got, tolerances)
            found.departures += reported.compare(found)
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
    for (kind, name, _), each in got.items():
        if kind == INITIAL and each.missing:
            raise UserError(
                f"The record {shown(candidate.folder)} has {each.kept.covered:,} elements of {name}, and "
                f"{each.missing:,} are missing; let every rank record, and the adapter place all its parts."
            )


def _precision(*records: Record) -> str:
    dtypes = {dtype for record in records for facts in record.ranks for dtype in facts["dtypes"]}
    dtypes |= {dtype for record in records for facts in record.ranks for dtype in facts.get("activation_dtypes", ())}
    for name in ("bfloat16", "float16", "float32"):
        if name in dtypes:
            return name
    return "float64"


def _note(found: Findings, reference: Record, candidate: Record) -> None:
    if found.first is not None and any(
        numbers.get("drew_random_numbers") for facts in candidate.ranks for numbers in facts["numbers"].values()
    ):
        found.notes.append(
            "The forward pass draws random numbers (dropout?), which ranks draw differently in most frameworks: "
            "compare with dropout 0 first."
        )
    if OUTPUT not in found.compared:
        found.notes.append("No module's output was recorded by both, so that only parameters tell where it begins.")
    versions = [record.facts["versions"] for record in (reference, candidate)]
    for name in sorted(set(versions[0]) & set(versions[1])):
        if versions[0][name] != versions[1][name]:
            found.notes.append(
                f"The runs have different versions of {name}: {versions[0][name]} and {versions[1][name]}."
            )
    if any(len(record.ranks) > 1 for record in (reference,)):
        found.notes.append(f"The reference has {len(reference.ranks)} ranks itself.")
