"""Verdict on two records: a sentence on where the departure begins and its shape, a table, and a page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite, log10
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from threefold_parity.departure import LOSS, NORM, NUMBER, PHASES, SAMPLES, Departure, Findings, phase_of, without_key
from threefold_parity.mistake import NOT_FINITE
from threefold_parity.record import BUFFER, GRADIENT, INITIAL, OUTPUT, OUTPUT_GRADIENT, UPDATE, Record
from threefold_parity.text import first_of

_LISTED: Final = 8
_PLURALS: Final = {"is": "are", "has": "have", "lacks": "lack", "differs": "differ"}


@dataclass(frozen=True)
class Judgement:
    """Verdict of a comparison: where the departure begins, if any, and all departures of its step and kind."""

    equal: bool
    sentence: str
    first: Departure | None = None
    together: tuple[Departure, ...] = ()

    def document(self, found: Findings) -> dict[str, Any]:
        whole: dict[str, list[str]] = {kind: [] for kind, _ in found.whole}
        for (kind, name), is_whole in found.whole.items():
            whole[kind] += [name] if is_whole else []
        return {
            "equal": self.equal,
            "sentence": self.sentence,
            "steps": found.steps,
            "compared": found.compared,
            "whole": whole,
            "notes": found.notes,
            "departures": [
                {
                    "step": each.step,
                    "kind": each.kind,
                    "name": each.name,
                    "error": _number(each.error),
                    "tolerance": each.tolerance,
                    "factor": _number(each.scale),
                    "shape": each.shape,
                    "where": each.where,
                }
                for each in found.departures
            ],
        }


def compared_whole(found: Findings) -> str:
    """Return which tensors were compared element by element, in a sentence."""
    parts = []
    for kind in (OUTPUT, OUTPUT_GRADIENT, GRADIENT, UPDATE):
        names = [name for (at, name), is_whole in found.whole.items() if at == kind and is_whole]
        others = [name for (at, name), is_whole in found.whole.items() if at == kind and not is_whole]
        lacking = f" (not {first_of(others, 1)})" if others else ""
        parts.append(f"{len(names)} of {len(names) + len(others)} {kind}s{lacking}")
    return f"Compared whole: {', '.join(parts)}."


def judge(found: Findings) -> Judgement:
    """Return the verdict on a comparison, led by the departure to name among those of the first step and kind.

    One that ranks disagree about is named before others. Of gradients it is the one that the backward pass computes
    first, because a departure there may propagate to gradients that are computed later.
    """
    if found.equal:
        totals: Counter[str] = Counter()
        for kind, count in found.compared.items():
            totals[without_key(kind)] += count
        kinds = ", ".join(f"{count:,} {kind}s" for kind, count in totals.items())
        steps = f"{found.steps} step{'s' if found.steps > 1 else ''}"
        return Judgement(True, f"Equal up to rounding in {steps}: {kinds}; {_seen(found)}.")
    first = found.departures[0]
    together = [each for each in found.departures if each.step == first.step and phase_of(each) == phase_of(first)]
    leading = [each for each in together if each.copies] or together
    lead = leading[-1] if leading[0].kind == GRADIENT else leading[0]
    rest = [each for each in together if each is not lead]
    return Judgement(False, _sentence(lead, together, found), lead, (lead, *rest))


def _seen(found: Findings) -> str:
    """Return which part of an epoch was seen; its last batch may be shorter, or repeat samples."""
    if not found.epoch_steps:
        return "not known is whether an epoch ends in them (epoch_steps)"
    begin = found.after % found.epoch_steps
    end = begin + found.steps
    if end >= found.epoch_steps:
        return f"an epoch of {found.epoch_steps} steps ends in them"
    return f"seen of an epoch of {found.epoch_steps} steps: {begin + 1} to {end}, not its last batch"


def _sentence(lead: Departure, together: Sequence[Departure], found: Findings) -> str:
    when = f" at step {lead.step}" if lead.step else ""
    kind = without_key(lead.kind)
    begin = f"{PHASES[kind]}{when}"
    if lead.shape == NOT_FINITE:
        begin = f"The runs cannot be compared{when or ' before the first step'}"
    shape = lead.shape or f"differs by {lead.error:.2g} of its size (rounding: {lead.tolerance:.1g})"
    where = f", {lead.where}" if lead.where and lead.where not in shape else ""
    total = found.totals.get((lead.step, kind), 0)
    others = len(together) - 1
    if kind == SAMPLES:
        return f"{begin}: they {shape}."
    if others and len({each.shape for each in together}) == 1 and lead.shape:
        if len(together) == total:
            return f"{begin}: all {total} {_of_several(shape)}{where}."
        return f"{begin}: {len(together)} of {total}, first {lead}, which {shape}{where}."
    more = f"; {others} more of {total} depart" + ("s" if others == 1 else "") if others and total else ""
    if kind in (LOSS, NORM, NUMBER):
        return f"{begin}: {lead} {shape}{where}{more}."
    return f"{begin}: first {lead}: it {shape}{where}{more}."


def _of_several(predicate: str) -> str:
    """Return a predicate for several subjects: `are zero` for `is zero`."""
    verb, _, rest = predicate.partition(" ")
    return f"{_PLURALS.get(verb, verb)} {rest.replace('the one of', 'those of')}"


def rows(verdict: Judgement, found: Findings) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of a table of the first departures: step, quantity, error, rounding and shape.

    Later departures are counted.
    """
    made = []
    for each in verdict.together[:_LISTED]:
        shape = ", ".join(part for part in (each.shape, each.where) if part)
        what = str(each).removeprefix("the ")
        made.append((str(each.step), what, f"{each.error:.2g}", f"{each.tolerance:.1g}", shape))
    if len(verdict.together) > _LISTED:
        made.append(("", f"and {len(verdict.together) - _LISTED} more of this kind", "", "", ""))
    later: dict[int, Counter[str]] = {}
    for each in found.departures:
        if each not in verdict.together:
            later.setdefault(each.step, Counter())[without_key(each.kind)] += 1
    for step, kinds in later.items():
        what = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items())
        made.append((str(step), f"then {what}", "", "", ""))
    return made


def print_rows(verdict: Judgement, found: Findings) -> None:
    """Print the rows as a table whose cells are folded, with columns close together on a narrow terminal."""
    made, console = Table(box=box.SIMPLE), Console()
    for number, name in enumerate(("step", "what departs", "error", "rounding", "shape")):
        made.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows(verdict, found):
        made.add_row(*map(Text, row))
    if Measurement.get(console, console.options.update(width=10**6), made).maximum > console.width:
        made.padding = (0, 0)
    console.print(made)


def _number(value: float) -> float | None:
    return value if isfinite(value) else None


_COLUMNS: Final = (INITIAL, OUTPUT, OUTPUT_GRADIENT, GRADIENT, UPDATE, BUFFER)
_STYLE: Final = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; color: #1d2733; padding: 0 1rem }
h1 { font-size: 1.3rem } .verdict { font-size: 1.1rem; padding: .8rem 1rem; border-left: 5px solid #1f9d61;
background: #eefaf3 } .departs { border-color: #c8372d; background: #fdf0ee }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .15rem .6rem; text-align: left; font-weight: 400 }
th { color: #5b6876 } td.cell { text-align: right; font-variant-numeric: tabular-nums; min-width: 5.5em;
border: 1px solid #fff } tr.first td:first-child { font-weight: 700 } tr.first { outline: 2px solid #c8372d }
code { font: 12.5px ui-monospace, monospace; white-space: pre } .steps a { margin-right: 1rem }
"""


def write_page(path: Path, verdict: Judgement, found: Findings, reference: Record, candidate: Record) -> None:
    """Write the page of a comparison: the verdict, the first departures, and for each step the tree of modules.

    A cell is the largest error of a module or parameter relative to its tolerance: green up to 1, from yellow to red
    above it.
    """
    title = f"{reference.folder.name} and {candidate.folder.name}"
    kind = "verdict" if verdict.equal else "verdict departs"
    parts = [
        '<!doctype html><html lang=en><meta charset=utf-8><meta name="generator" content="threefold parity">',
        f"<title>Parity: {escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>Parity of {escape(title)}</h1>",
        f"<p class='{kind}'>{escape(verdict.sentence)}</p>",
        *(f"<p>{escape(note)}</p>" for note in found.notes),
    ]
    if not verdict.equal:
        parts.append("<table><tr><th>step<th>what departs<th>error<th>rounding<th>shape</tr>")
        for row in rows(verdict, found):
            parts.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
        parts.append("</table>")
    for step in range(found.steps + 1):
        parts += _tree(step, verdict, found)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _tree(step: int, verdict: Judgement, found: Findings) -> list[str]:
    columns = [kind for kind in _COLUMNS if any(key[:2] == (step, kind) for key in found.worst)]
    if not columns:
        return []
    names = dict.fromkeys([*found.order, *(name for at, kind, name in found.worst if at == step and kind in columns)])
    first = verdict.first
    heading = f"Step {step}" if step else "Before the first step"
    made = [f"<h2>{heading}</h2><table><tr><th>module or parameter"]
    made += [f"<th>{'initial' if kind == INITIAL else kind}" for kind in columns]
    made.append("</tr>")

    def place(name: str) -> tuple[int, str]:
        """Return the position of a name in the tree: a parameter follows its module."""
        while name and name not in found.order:
            name = name.rpartition(".")[0]
        return found.order.index(name) if name else len(found.order), name

    for name in sorted(names, key=place):
        values = [found.worst.get((step, kind, name)) for kind in columns]
        if all(value is None for value in values):
            continue
        begins = first is not None and (first.step, first.name) == (step, name)
        label = "&nbsp;" * 4 * name.count(".") + escape(name)
        cells = "".join(map(_cell, values))
        made.append(f"<tr{' class=first' if begins else ''}><td><code>{label}</code></td>{cells}</tr>")
    made.append("</table>")
    return made


def _cell(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    if value <= 1:
        return f"<td class=cell style='background:hsl(140 45% {96 - 14 * value:.0f}%)'>{value:.2g}</td>"
    heat = min(log10(value) / 5, 1.0) if value != float("inf") else 1.0
    colour = f"hsl({45 - 42 * heat:.0f} 90% {82 - 18 * heat:.0f}%)"
    return f"<td class=cell style='background:{colour}'>{value:.3g}</td>"
