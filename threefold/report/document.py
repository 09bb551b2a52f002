"""The document of a report: everything that a page, a table or another program shows about runs, as plain JSON.

`RunReport` writes its page, which has the document inside, as RUN/report.html at the end of a run.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any, Final

from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import checkpoint_folders
from threefold.checkpoint.index import read_index
from threefold.checkpoint.resume import is_decisive
from threefold.comm.layout import AXES, Layout
from threefold.config.loading import differing_settings
from threefold.config.optimizer import described_groups
from threefold.errors import UserError
from threefold.files import (
    counted,
    format_bytes,
    how_often,
    load_json,
    shown,
)
from threefold.foreign import FolderFiles, write_nofollow
from threefold.report.checkpoints import group_of, listed
from threefold.report.console import clock
from threefold.report.curves import Curves
from threefold.report.door import REPORT_FILE
from threefold.report.page import fill_page, json_in_script
from threefold.report.record import SAMPLES_FILE, SUMS, RunRecord, number
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say

VERSION: Final = 1
PHASES: Final = {
    "data": "waiting for data",
    "callbacks": "callbacks",
    "forward_backward": "forward and backward",
    "update": "update",
}
"""Phases of a step, and their names in a report."""
LEDGER: Final = {
    "steps": "steps",
    "repeated": "repeated steps",
    "evaluating": "evaluations",
    "saving": "saving",
    "starting": "starting",
    "lost": "lost to restarts",
}
"""Parts of a run's time, and their names in a report."""

_SAME: Final = 1e-3
"""Relative difference of two losses up to which they count as the same: rounding grows as weights move."""

Settings = Mapping[str, Mapping[str, Any]]


def report_of(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the document of a report on runs; raises nothing for damaged files, which `warnings` name.

    Its members are `format`, `version`, `threefold`, `made`, `phases` and `ledger` (names of the parts of a step and of
    a run), `differences` (settings that differ, with each run's value), `comparison` (a sentence about the losses of
    runs whose settings lead to the same results), and `runs`, each with `name`, `folder`, `state`, `summary` (rows of a
    table, by name), `layout`, `settings`, `curves`, `evaluations`, `logged` and `valid_logged` (what callbacks logged),
    `difference` (of the losses from those of the first run; `Curves.document`), `phases` and `waited` (seconds),
    `attempts`, `goodput`, `events`, `checkpoints`, `samples` and `warnings`.
    """
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    documents = [{**_run(run), "name": name} for run, name in zip(runs, names, strict=True)]
    differences = differing_settings([document["settings"] for document in documents])
    comparison = "" if any(map(is_decisive, differences)) else _compare(runs, documents)
    installed = ""
    with suppress(PackageNotFoundError):  # run from a folder of sources
        installed = version("threefold")
    return {
        "format": "threefold-report",
        "version": VERSION,
        "threefold": installed,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "phases": PHASES,
        "ledger": LEDGER,
        "differences": differences,
        "comparison": comparison,
        "runs": documents,
    }


def sentence_of(run: RunRecord, steps: int | None) -> str:
    """Return a run's progress in words; `steps` is the number of steps of the whole run, if it is known."""
    last = run.curves.last_step
    of = f" of {steps:,}" if steps else ""
    if not last:
        return "running; no step is complete" if run.is_running else "ended before the first step"
    if run.is_running:
        return f"running, step {last:,}{of}"
    return f"finished, {last:,} steps" if last == steps else f"ended after step {last:,}{of}"


def steps_of(settings: Settings) -> int | None:
    """Return the number of steps of a complete run; None if its settings do not determine it."""
    found = settings.get("train", {}).get("max_steps")
    return found if type(found) is int else None


def _compare(runs: Sequence[RunRecord], documents: Sequence[dict[str, Any]]) -> str:
    """Add to the documents the differences of the losses from those of the first run; return a sentence about them."""
    first, worst, compared = runs[0].losses, (0.0, 0.0, "", 0), set[int]()
    for run, document in zip(runs[1:], documents[1:], strict=True):
        found = Curves()
        for step in sorted(first.keys() & run.losses.keys()):
            difference = abs(run.losses[step] - first[step])
            found.add(step, {"loss": difference})
            worst = max(worst, (difference, difference / (abs(first[step]) or 1.0), document["name"], step))
            compared.add(step)
        document["difference"] = found.document() if found.last_step else None
    if not compared:
        return ""
    difference, relative, name, step = worst
    layouts = len({document["summary"].get("layout") for document in documents})
    where = f"in {layouts} layouts" if layouts > 1 else f"in {len(runs)} runs"
    over = f"{where} over {counted(len(compared), 'step')}"
    if not difference:
        return f"The same loss {over}, equal in every digit."
    same = f"The same loss {over}" if relative <= _SAME else f"The losses {over} differ"
    return (
        f"{same}: the largest difference is {difference:.2g} ({relative:.1g} of the loss), of {name} at step {step:,}."
    )


def _run(run: RunRecord) -> dict[str, Any]:
    settings, problem = run.settings()
    settings = _plain(settings)
    curves, ledger, warnings = run.curves, run.goodput, run.warnings()
    checkpoints, parameters = _checkpoints(run.folder)
    samples, cut = _samples(run.folder)
    layout, steps = _layout(settings), steps_of(settings)
    phases = {name: round(curves.total(f"phase/{name}"), 6) for name in PHASES if f"phase/{name}" in curves.names()}
    versions: dict[str, str] = next(
        (found["versions"] for found in reversed(checkpoints["listed"]) if found["versions"]), {}
    )
    newest = ""
    if complete := [each for each in checkpoints["listed"] if each["state"] == "complete"]:
        last = complete[-1]
        weights = f": weights {last['weights']}" if last["weights"] else ""
        newest = f"{checkpoints['count']:,}; the newest after step {last['step']:,}{weights}"
    train, precision = settings.get("train", {}), settings.get("precision", {}).get("dtype", "")
    device, exact = train.get("device"), "exact" if train.get("exact") is True else ""
    facts = {
        "state": sentence_of(run, steps),
        "model": _model(settings, parameters),
        "layout": "" if layout is None else _layout_text(layout, settings),
        "data": _data(settings),
        "groups": described_groups(settings.get("optimizer", {}).get("groups")),
        "precision": _joined(" ", precision, f"on {device}" if device in ("cpu", "cuda") else "", exact),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        **_results(run),
        "goodput": _goodput(run),
        "checkpoints": newest,
    }
    return {
        "folder": str(run.folder),
        "state": "running" if run.is_running else "finished" if curves.last_step == steps else "ended",
        "steps": steps,
        "summary": {name: text for name, text in facts.items() if text},
        "layout": None if layout is None else _layout_facts(layout),
        "settings": settings,
        "curves": curves.document(SUMS),
        "evaluations": run.evaluations.document(),
        "logged": run.logged.document(),
        "valid_logged": run.valid_logged.document(),
        "phases": phases,
        "waited": round(curves.total("waited"), 6),
        "seconds": round(curves.total("seconds"), 6),
        "attempts": [{"step": step, "elapsed": round(elapsed, 3)} for step, elapsed in run.attempts],
        "goodput": {
            "ledgers": run.ledgers,
            "now": None if ledger is None else {"seconds": ledger.seconds(), "restarts": ledger.restarts},
        },
        "events": run.events(),
        "checkpoints": checkpoints,
        "samples": samples,
        "warnings": [*([problem] if problem else []), *warnings, *cut],
    }


def _plain(value: Any) -> Any:
    """Return a YAML value in a form that JSON can express: infinities and NaN as text."""
    if isinstance(value, dict):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_plain(inside) for inside in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _model(settings: Settings, parameters: int) -> str:
    model = settings.get("model", {})
    count = f"{parameters:,} parameters" if parameters else ""
    if model.get("architecture") == "own":
        return _joined(", ", "own", model.get("file"), count)
    sizes = {"num_layers": "layers", "hidden_size": "wide", "num_attention_heads": "heads"}
    shape = " × ".join(f"{model[name]} {word}" for name, word in sizes.items() if name in model)
    return _joined(", ", model.get("preset") or model.get("architecture"), shape, count)


def _data(settings: Settings) -> str:
    data, batch = settings.get("data", {}), settings.get("train", {}).get("global_batch_size")
    mixture = data.get("mixture")
    source = data.get("path") or _joined(", ", *(mixture if isinstance(mixture, dict) else ()))
    length = f" of {_by_step(data['sequence_length'])} tokens" if "sequence_length" in data else ""
    return _joined(", ", source, f"{_by_step(batch)} samples{length} a step" if batch else "")


def _by_step(value: object) -> str:
    """Return a stored setting's value as text; of values by step, the first and in brackets the later ones."""
    if not isinstance(value, dict) or not value:
        return str(value)
    (_, first), *later = value.items()
    after = ", ".join(f"{each} after step {step}" for step, each in later)
    return f"{first} ({after})" if later else str(first)


def _joined(separator: str, *parts: object) -> str:
    return separator.join(str(part) for part in parts if part)


def _layout(settings: Settings) -> Layout | None:
    parallel = settings.get("parallel", {})
    sizes = {axis: parallel.get(axis, 1) for axis in (*AXES, "ep")}
    if not parallel or not all(type(size) is int for size in sizes.values()):
        return None
    try:
        return Layout(**sizes)
    except UserError:  # of a file that was changed
        return None


def _layout_text(layout: Layout, settings: Settings) -> str:
    parallel = settings["parallel"]
    zero = f", zero {parallel['zero']}" if parallel.get("zero") else ""
    schedule = f", {parallel.get('schedule')}" if layout.pp > 1 else ""
    return f"{layout}{zero}{schedule}, {counted(layout.world_size, 'rank')}"


def _layout_facts(layout: Layout) -> dict[str, Any]:
    """Return the sizes of the axes and, for layouts that are drawn completely, the coordinates of each rank."""
    ranks = range(layout.world_size) if layout.world_size <= 256 else ()
    sizes = {axis: layout.size(axis) for axis in (*AXES, "ep")}
    return {"sizes": sizes, "axes": AXES, "ranks": [list(layout.coordinates(rank)) for rank in ranks]}


def _results(run: RunRecord) -> dict[str, str]:
    """Return the rows of the summary about losses, speed, time and memory; empty ones have no value."""
    curves, line = run.curves, run.recent[-1] if run.recent else {}
    seconds, count = curves.total("seconds"), len(curves)
    if not count or not seconds:
        return {}
    values = curves.document()["values"]
    each = seconds / curves.count("seconds")
    loss, norm, rate = (number(line, name) for name in ("loss", "grad_norm", "lr"))
    phases = {word: curves.total(f"phase/{name}") / seconds for name, word in PHASES.items()}
    memory = _highest(values.get("memory", {}))
    capacity, work = curves.total("capacity"), curves.total("work")
    unit, scale = ("TFLOP/s", 1.0) if work >= seconds else ("GFLOP/s", 1000.0)
    duration = f"{1000 * each:,.0f} ms" if each < 10 else f"{each:,.1f} s"
    return {
        "loss": "not finite" if loss is None else f"{loss:.4f} at step {line['step']:,}",
        "validation": _validation(run),
        "learning rate": _learning_rate(values.get("lr", {}), rate, line["step"]),
        "gradient norm": "" if norm is None else f"{norm:.3f}",
        "tokens": f"{curves.total('tokens'):,.0f} trained on",
        "speed": f"{curves.total('read') / seconds:,.0f} tokens/s, {duration} a step",
        "MFU": f"{work / capacity:.1%}" if capacity else "",
        "compute": f"{scale * (work / seconds):,.1f} model {unit} a rank" if work else "",
        "time of a step": ", ".join(f"{word} {fraction:.0%}" for word, fraction in phases.items() if fraction >= 0.005),
        "waiting": f"{curves.total('waited') / seconds:.0%} of it, in collectives" if curves.total("waited") else "",
        "memory": f"{format_bytes(int(memory))} on the rank that takes most" if memory else "",
    }


def _highest(curve: dict[str, Any]) -> float:
    return max((each for each in curve.get("high", curve.get("mean", ())) if each), default=0)


def _learning_rate(curve: dict[str, Any], last: float | None, step: int) -> str:
    """Return the peak of the learning rate, and the last one if that is another."""
    if last is None:
        return ""
    peak, now = f"{_highest(curve):.3e}", f"{last:.3e}"
    return now if now == peak else f"{peak} at its peak, {now} at step {step:,}"


def _validation(run: RunRecord) -> str:
    losses = run.evaluations.document()["values"].get("valid_loss")
    if run.evaluation is None or losses is None:
        return ""
    lowest = min(each for each in losses.get("low", losses["mean"]) if each is not None)
    last = number(run.evaluation, "valid_loss")
    now, least = "not finite" if last is None else f"{last:.4f}", f"{lowest:.4f}"
    averaged = number(run.evaluation, "valid_loss_average")
    return (
        f"{now} at step {run.evaluation['step']:,}"
        + (f", lowest {least}" if least != now else "")
        + (f"; {averaged:.4f} of the averaged weights" if averaged is not None else "")
    )


def _goodput(run: RunRecord) -> str:
    found = run.goodput
    if found is None or not found.total:
        return ""
    restarts = f", {counted(found.restarts, 'restart')}" if found.restarts else ""
    resumed = found.attempts - found.restarts - 1
    again = f", resumed {how_often(resumed)}" if resumed > 0 else ""
    return f"{found.fraction:.1%} of {clock(found.total)}{restarts}{again}"


def _checkpoints(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the newest checkpoints of a run and the number of all, and the parameters of the newest one's model."""
    parameters, kept, paths, newest = 0, [], list[Path](), None
    with suppress(UserError):
        paths = checkpoint_folders(folder)
    for path in paths[-50:]:
        one = listed(path)
        values = one.document()
        facts = {name: values[name] for name in ("step", "state", "reason", "bytes", "saved", "versions")}
        kept.append({**facts, "name": path.name, "layout": one.layout, "weights": values["fingerprint"]})
        newest = path if one.state == "complete" else newest
    if newest is not None:
        with suppress(UserError):
            index = read_index(newest)
            parameters = group_of({name: index[name] for name in index if name.startswith(MODEL)}).elements
    return {"count": len(paths), "listed": kept}, parameters


def _samples(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the newest texts that the run has kept (`threefold generate --keep`), and a sentence about bad lines."""
    path, files = folder / SAMPLES_FILE, FolderFiles(folder)
    if not files.holds(SAMPLES_FILE):
        return [], []
    try:
        lines = files.text(SAMPLES_FILE, limit=4 << 20).splitlines()
    except UserError as error:
        return [], [f"{str(error).removesuffix('.')}; the report is without it."]
    found, damaged = [], 0
    for text in lines:
        try:
            line = load_json(text)
            found.append({"step": int(line["step"]), "prompt": str(line["prompt"]), "text": str(line["text"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            damaged += bool(text.strip())
    told = [f"{path} has {damaged:,} damaged line{'s' if damaged > 1 else ''}; the others are used."] if damaged else []
    return found[-50:], told


class RunReport(Callback):
    """Write the report of the whole run after its last step; if it cannot be written, say so."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_fit(self) -> None:
        path = self.folder / REPORT_FILE
        # A report that fails must not fail a finished run.
        try:
            record = RunRecord(self.folder, ended=True)
            record.update()
            write_nofollow(path, make_page(report_of([record])))
        except Exception as error:
            say(f"Warning: {path} cannot be written ({reason_of(error)}).")


def make_page(document: Mapping[str, Any], poll: int = 0) -> str:
    """Return the HTML of a report (`report_of`), with its script, style and data inside; it loads nothing.

    After `poll` milliseconds, if that is not 0, the page asks its server for `report.json` again.
    """
    files = (Path(__file__).with_name(f"page.{kind}") for kind in ("html", "css", "js"))
    page, style, script = [file.read_text(encoding="utf-8") for file in files]
    title = escape(", ".join(run["name"] for run in document["runs"]))
    parts = {"connect": "'self'" if poll else "'none'", "title": title, "css": style, "poll": str(poll), "js": script}
    return fill_page(page, {**parts, "json": json_in_script(document)})


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page of a report to a file; raise a `UserError` if it cannot be written."""
    try:
        path.write_text(make_page(document), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {shown(path)} cannot be written: {error.strerror}.") from None
