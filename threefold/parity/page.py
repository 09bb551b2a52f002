"""A page that shows a comparison: the tree of modules, coloured by how far each departs."""

from html import escape
from math import log10
from pathlib import Path
from typing import Final

from threefold.parity.departure import Findings
from threefold.parity.record import BUFFER, GRADIENT, INITIAL, OUTPUT, OUTPUT_GRADIENT, UPDATE, Record
from threefold.parity.verdict import Judgement, rows

_COLUMNS: Final = (
    (INITIAL, "initial"),
    (OUTPUT, "output"),
    (OUTPUT_GRADIENT, "output gradient"),
    (GRADIENT, "gradient"),
    (UPDATE, "update"),
    (BUFFER, "buffer"),
)
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
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Parity: {escape(title)}</title>",
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
    columns = [(kind, name) for kind, name in _COLUMNS if any(key[:2] == (step, kind) for key in found.worst)]
    if not columns:
        return []
    shown = {kind for kind, _ in columns}
    names = list(
        dict.fromkeys([*found.order, *(name for at, kind, name in found.worst if at == step and kind in shown)])
    )
    first = verdict.first
    heading = f"Step {step}" if step else "Before the first step"
    made = [f"<h2>{heading}</h2><table><tr><th>module or parameter"]
    made += [f"<th>{escape(name)}" for _, name in columns]
    made.append("</tr>")
    for name in sorted(names, key=lambda each: _place(each, found.order)):
        values = [found.worst.get((step, kind, name)) for kind, _ in columns]
        if all(value is None for value in values):
            continue
        begins = first is not None and (first.step, first.name) == (step, name)
        label = "&nbsp;" * 4 * name.count(".") + escape(name)
        cells = "".join(_cell(value) for value in values)
        made.append(f"<tr{' class=first' if begins else ''}><td><code>{label}</code></td>{cells}</tr>")
    made.append("</table>")
    return made


def _place(name: str, order: list[str]) -> tuple[int, str]:
    """Return the position of a name in the tree: a parameter follows its module."""
    while name:
        if name in order:
            return order.index(name), name
        name = name.rpartition(".")[0]
    return len(order), name


def _cell(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    if value <= 1:
        return f"<td class=cell style='background:hsl(140 45% {96 - 14 * value:.0f}%)'>{value:.2g}</td>"
    heat = min(log10(value) / 5, 1.0) if value != float("inf") else 1.0
    colour = f"hsl({45 - 42 * heat:.0f} 90% {82 - 18 * heat:.0f}%)"
    return f"<td class=cell style='background:{colour}'>{value:.3g}</td>"
