"""Re-enact real silent bugs in a small parallel GPT, and see what a comparison of training steps says of each.

    python -m benchmarks.parity [--only ROW ...] [--layouts] [--write-docs]

Each row of `parity_gpt/mistakes` is run twice, without the mistake (one process, as a rule) and with it, three steps
each, and the records are compared by `threefold_parity`: found, the right name first, the right shape of the mistake?
Beside it stands what other checks see in the same steps: a gradient norm or a loss that is 1 % off at any step, and
`torch.testing.assert_close` on the last weights. `--layouts` runs layouts without a mistake, in two precisions and
with two seeds; the exit status is 1 unless all are equal.
"""

import argparse
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parity_gpt import checkpoint
from benchmarks.parity_gpt.mistakes import IN_THREEFOLD, ROWS, Row
from benchmarks.parity_launch import RunFailed, launch
from threefold.constants import PARITY_WIDE
from threefold.errors import UserError
from threefold_parity.compare import compare
from threefold_parity.departure import Findings, without_key
from threefold_parity.record import Record
from threefold_parity.verdict import Judgement, judge

NOISY = 2
"""Further runs of each reference with noise in the last place, from which tolerances are learned."""
DENSE = "--rotary --qk-norm --sink --kv-heads 2 --swiglu --masked"
MIXTURE = "--experts 4 --auxiliary 0.2 --expert-bias 0.05 --groups 2 --masked"
LAYOUTS = {
    "": [
        "--dp 2",
        "--tp 2",
        "--tp 2 --sp",
        "--cp 2",
        "--cp 2 --ulysses",
        "--pp 2 --micro-batches 4",
        "--dp 2 --zero 1",
        "--dp 2 --zero 1 --accumulate 2",
    ],
    DENSE: [
        "--dp 2 --accumulate 2 --zero 2",
        "--tp 2 --sp --dp 2",
        "--cp 2 --tp 2",
        "--cp 2 --ulysses --recompute",
        "--pp 2 --micro-batches 2 --zero-bubble --tp 2 --sp",
        "--tp 2 --dp 2 --recompute --save-parts",
    ],
    MIXTURE: [
        "--tp 2",
        "--tp 2 --sp",
        "--tp 2 --ep 2",
        "--tp 2 --ep 2 --dp 2 --sp",
        "--dp 4 --ep 2",
        "--cp 2",
        "--dp 4",
    ],
    "--tied --extra-head --chunked-loss --masked": ["--pp 2 --micro-batches 2", "--tp 2 --sp", "--dp 2 --hybrid 2"],
    "--optimizer muon --swiglu": ["--tp 2", "--dp 2 --accumulate 2"],
    "--variable --accumulate 2": ["--pp 2 --micro-batches 2"],
}
PRECISIONS = ("", "--dtype bfloat16")
SEEDS = (1, 2)


@dataclass
class Found:
    """What the comparison and the other checks saw of a row."""

    row: Row
    failed: str = ""
    comparison: Findings = field(default_factory=Findings)
    norm: bool = False
    loss: bool = False
    weights: bool = False

    @property
    def verdict(self) -> Judgement:
        return judge(self.comparison)

    @property
    def found(self) -> bool:
        return not self.verdict.equal

    @property
    def named(self) -> bool:
        """Whether the verdict begins with a name that leads to the mistake."""
        first = self.verdict.first
        if first is None:
            return False
        names = first.name or first.kind, f"{first.kind} {first.name}", str(first)
        return any(fnmatchcase(name, each) for name in names for each in self.row.right)

    @property
    def shaped(self) -> bool | None:
        """Whether the verdict says the shape; None if the mistake has none."""
        if not self.row.shape:
            return None
        return self.verdict.first is not None and re.search(self.row.shape, self.verdict.sentence) is not None


class Board:
    """Runs rows; what two rows share, such as a reference with its noisy runs, is run once.

    Args:
        folder: folder for the runs; those that are there from before are not run again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def row(self, row: Row) -> Found:
        """Run a row, and compare."""
        found = Found(row)
        try:
            if row.prepare:
                mistake = row.key if row.mistaken else ""
                writer = f"{row.model} {row.prepare}"
                checkpoints = self._checkpoints(writer, mistake)
                self._run(writer, checkpoints, mistake)
            else:
                checkpoints = self._checkpoints(f"{row.model} {row.reference}")
            reference = self._reference(f"{row.model} {row.reference}", checkpoints, bool(row.prepare))
            candidate = self._run(f"{row.model} {row.layout}", checkpoints, row.key)
            self._judge(found, reference, candidate)
        except (RunFailed, UserError) as error:
            found.failed = str(error)
        return found

    def _judge(self, found: Found, runs: Sequence[Path], candidate: Path) -> None:
        ours, *noisy = (Record(run / "record") for run in runs)
        other = Record(candidate / "record")
        found.comparison = compare(ours, other, noisy)
        for step in range(1, 4):
            a, b = (record.facts["numbers"][str(step)]["scalars"] for record in (ours, other))
            found.norm |= _far(float(b["gradient norm"]), float(a["gradient norm"]))
            found.loss |= _far(float(b["loss"]), float(a["loss"]))
        found.weights = not _weights_equal(runs[0] / "final", candidate / "final")

    def _reference(self, arguments: str, checkpoints: Path, written: bool) -> list[Path]:
        """Run a reference, and again with noise; `written`: it only reads its checkpoints."""
        runs = [self._run(arguments, checkpoints)]
        for seed in range(1, NOISY + 1):
            own = checkpoints if written else self._checkpoints(arguments, f"noise {seed}")
            runs.append(self._run(arguments, own, noise=seed))
        return runs

    def _run(self, arguments: str, checkpoints: Path, mistake: str = "", noise: int = 0, wide: bool = False) -> Path:
        folder = self._named(arguments, checkpoints.name, mistake, "wide" if wide else str(noise))
        if (folder / "ended").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        environment = {"THREEFOLD_PARITY": str(folder / "record"), "THREEFOLD_PARITY_PERTURB": str(noise or "")}
        environment |= {PARITY_WIDE: "1" if wide else ""}
        words = arguments.replace("{folder}", str(checkpoints)).split()
        folder.mkdir(parents=True)
        launch([*words, "--final", str(folder / "final"), "--mistake", mistake], environment)
        (folder / "ended").touch()
        return folder

    def _checkpoints(self, *writer: str) -> Path:
        made = self._named("checkpoints", *writer)
        made.mkdir(parents=True, exist_ok=True)
        return made

    def _named(self, *parts: str) -> Path:
        return self.folder / blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def _far(value: float, expected: float) -> bool:
    return not abs(value - expected) <= 0.01 * abs(expected)


def _weights_equal(reference: Path, candidate: Path) -> bool:
    """Return whether `torch.testing.assert_close` passes for all weights after the last step."""
    ours, others = (_final(folder) for folder in (reference, candidate))
    for name in {name for document in ours for name in document["tensors"]}:
        try:
            torch.testing.assert_close(checkpoint.whole(others, name, "weight"), checkpoint.whole(ours, name, "weight"))
        except AssertionError:
            return False
    return True


def _final(folder: Path) -> list[dict[str, Any]]:
    files = sorted(next(folder.iterdir()).iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    return [torch.load(path, weights_only=True) for path in files]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="patterns of rows or layouts, such as megatron-7452-*")
    parser.add_argument("--write-docs", action="store_true", help="write the table and its sums into parity_bugs.md")
    parser.add_argument("--layouts", action="store_true", help="layouts without a mistake in place of the rows")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that are there are not run again")
    parser.add_argument("--explain", action="store_true", help="the first departures of each row")
    options = parser.parse_args(arguments)
    console = Console(width=200)
    with tempfile.TemporaryDirectory() as temporary:
        board = Board(options.keep or Path(temporary))
        if options.layouts:
            pairs = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
            runs = [f"{precision} --seed {seed}".strip() for precision in PRECISIONS for seed in SEEDS]
            rows = [
                Row("", "", "", "", f"{model} {run}".strip(), layout, ()) for run in runs for model, layout in pairs
            ]
        else:
            rows = list(ROWS)
        if options.only:
            known, rows = rows, [row for row in rows if any(fnmatchcase(row.title, each) for each in options.only)]
            if not rows:
                parser.error(f"--only {' '.join(options.only)} fits none of the titles, such as {known[0].title!r}")
        found = []
        for row in rows:
            found.append(board.row(row))
            if options.explain:
                _explain(found[-1], console)
    console.print(_table(found))
    console.print(alarms(found) if options.layouts else sums(found), markup=False)
    if options.write_docs:
        write_docs(found)
    if any(each.failed or (options.layouts and each.found) for each in found):
        raise SystemExit(1)


def sums(found: Sequence[Found]) -> str:
    """Return how many rows each check found, in a sentence."""
    count = len(found)
    shapes = [each.shaped for each in found if each.shaped is not None]
    named = sum(each.named for each in found)
    return (
        f"Of {count} bugs the comparison finds {sum(each.found for each in found)}, names the right place of {named} "
        f"and says the right shape of {sum(shapes)} of the {len(shapes)} that have one; a gradient norm 1 % off finds "
        f"{sum(each.norm for each in found)}, a loss 1 % off {sum(each.loss for each in found)}, and "
        f"torch.testing.assert_close on the weights {sum(each.weights for each in found)}."
    )


def alarms(found: Sequence[Found]) -> str:
    """Return how many pairs without a mistake depart, and how near to it the others come, in a sentence."""
    ran = [each for each in found if not each.failed]
    wrong = sum(each.found for each in ran)
    nearest: dict[str, float] = {}
    for each in ran:
        for (_, kind, _), ratio in each.comparison.worst.items():
            nearest[without_key(kind)] = max(nearest.get(without_key(kind), 0.0), ratio)
    shares = ", ".join(f"{ratio:.2f} ({kind})" for kind, ratio in sorted(nearest.items(), key=lambda item: -item[1]))
    return (
        f"Of {len(ran)} pairs without a mistake {wrong} depart, and {len(found) - len(ran)} did not run. Largest share "
        f"of a tolerance: {shares}. torch.testing.assert_close fails for the weights of "
        f"{sum(each.weights for each in ran)}."
    )


def write_docs(found: Sequence[Found]) -> None:
    """Write the table into parity_bugs.md, between its marks."""
    marks = {True: "yes", False: "no", None: "–"}
    headings = "bug | mistake | run | found | name | shape | verdict | norm | loss | weights | in Threefold"
    lines = [f"| {headings} |", "|" + "---|" * 11]
    for each in found:
        row = each.row
        options = f"{row.model} {row.layout}".replace("{folder}", "…").split()
        seen = [marks[value] for value in (each.found, each.named, each.shaped)]
        others = [marks[value] for value in (each.norm, each.loss, each.weights)]
        text = each.failed.splitlines()[-1] if each.failed else each.verdict.sentence
        cells = [
            f"{row.repository} {row.thread}",
            row.what,
            f"`{' '.join(options)}`" if options else "",
            *seen,
            text,
            *others,
            IN_THREEFOLD.get(row.key, ""),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    begin, end = "<!-- scoreboard: written by benchmarks/parity.py -->", "<!-- end of scoreboard -->"
    page = Path(__file__).parent / "parity_bugs.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    middle = "\n".join([sums(found), "", *lines])
    page.write_text(f"{before}{begin}\n\n{middle}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def _explain(found: Found, console: Console) -> None:
    marks = f"found {found.found}, name {found.named}, shape {found.shaped}"
    others = f"norm {found.norm}, loss {found.loss}, weights {found.weights}"
    console.print(
        f"{found.row.key} [{found.row.model} {found.row.layout}]: {marks}; {others} {found.failed}", markup=False
    )
    console.print(f"    {found.verdict.sentence}", markup=False)
    for each in found.verdict.together[1:4]:
        text = f"    - {each} {each.shape or '?'} {each.where} (error {each.error:.2g}, rounding {each.tolerance:.1g})"
        console.print(text, markup=False)


def _table(found: Sequence[Found]) -> Table:
    table = Table("row", "found", "name", "shape", "verdict", "norm", "loss", "weights")
    marks = {True: "yes", False: "no", None: "–"}
    for each in found:
        seen = [marks[value] for value in (each.found, each.named, each.shaped)]
        others = [marks[value] for value in (each.norm, each.loss, each.weights)]
        text = each.failed[-60:] or each.verdict.sentence
        table.add_row(each.row.title, *seen, text, *others)
    return table


if __name__ == "__main__":
    main()
