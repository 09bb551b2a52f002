"""Runs of a config with several values of some settings: their names, their state, and how they are made.

A sweep's folder has a folder for each run, `logs/NAME.log` with what each printed, `sweep.json` with their state, and
in the end `report.html`, which compares them. Each run is a process of `threefold train --resume=auto`, so that a sweep
that is started again goes on where it stopped.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError
from threefold.files import hide_secrets, load_json, on_one_line, shown
from threefold.foreign import FolderFiles, nofollow_folder, open_nofollow, write_nofollow
from threefold.report.console import clock
from threefold.report.metrics import read_metrics

SWEEP_FILE: Final = "sweep.json"
LOGS: Final = "logs"
MOST_RUNS: Final = 1000
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
_POLL: Final = 0.2  # seconds between looks at the runs
_LONGEST: Final = 48  # characters of a value in a name


@dataclass(frozen=True)
class Swept:
    """Settings of a sweep: those with several values, and those that all runs have."""

    values: Mapping[str, tuple[str, ...]]
    common: tuple[str, ...] = ()

    @classmethod
    def parse(cls, settings: Sequence[str]) -> "Swept":
        """Parse `section.key=a,b,c`, where commas in brackets, braces and quotes separate nothing."""
        values, common = dict[str, tuple[str, ...]](), list[str]()
        for each in settings:
            key, equals, text = each.partition("=")
            found = tuple(part.strip() for part in _split(text))
            if not equals or not all(found):
                raise UserError(
                    f"--set {shown(each)} must be SECTION.KEY=VALUE,VALUE…, such as optimizer.lr=1e-3,3e-3; put a "
                    "value that has commas itself in brackets or quotes."
                )
            if key in values or any(other.partition("=")[0] == key for other in common):
                raise UserError(f"--set has {shown(key)} twice; give all its values at once, between commas.")
            if len(set(found)) < len(found):
                raise UserError(f"--set {shown(each)} has a value twice; leave one of them out.")
            if len(found) > 1:
                values[key] = found
            else:
                common.append(each)
        count = 1
        for found in values.values():
            count *= len(found)
        if not values:
            raise UserError("A sweep needs a setting with several values, such as --set optimizer.lr=1e-3,3e-3.")
        if count > MOST_RUNS:
            raise UserError(f"These values make {count:,} runs and a sweep has at most {MOST_RUNS:,}; give fewer.")
        return cls(values, tuple(common))

    def runs(self) -> list["SweepRun"]:
        """Return a run for each combination of values, the last setting's values changing first."""
        last = [key.rpartition(".")[2] for key in self.values]
        names = [each if last.count(each) == 1 else key for key, each in zip(self.values, last, strict=True)]
        made, taken = list[SweepRun](), set[str]()
        for chosen in product(*self.values.values()):
            name = ",".join(f"{each}={_fit(value)}" for each, value in zip(names, chosen, strict=True))[:200]
            name = name if name not in taken else f"{name},{len(made) + 1}"
            taken.add(name)
            settings = dict(zip(self.values, chosen, strict=True))
            made.append(SweepRun(name, settings, (*self.common, *(f"{key}={each}" for key, each in settings.items()))))
        return made


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a text between commas that stand outside brackets, braces and quotes."""
    depth, quote, part = 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not depth and not quote:
            yield part
            part = ""
        else:
            part += letter
    yield part


def _fit(value: str) -> str:
    """Return a value fit for the name of a folder."""
    return re.sub(r"[^\w.+-]+", "-", value)[-_LONGEST:].strip("-.") or "value"


@dataclass
class SweepRun:
    """Run of a sweep.

    Attributes:
        name: name of its folder.
        settings: its values of the swept settings, as given.
        overrides: arguments of `--set`.
        config: hash of its config; a run that finished with another one is started again, to continue or be refused.
        state: `finished`, `failed`, `stopped`, or empty before it has ended.
        reason: sentence about its end, if it failed.
    """

    name: str
    settings: Mapping[str, str]
    overrides: tuple[str, ...]
    config: str = ""
    state: str = ""
    reason: str = ""
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    began: float = 0.0


class Sweep:
    """A sweep in its folder.

    Args:
        arguments: arguments of `threefold train` behind the config, of all runs.
        say: prints a line.
        show: shows the progress of the runs that go on, in place; not called where `interval` is 0.
    """

    def __init__(
        self,
        config: Path,
        folder: Path,
        runs: Sequence[SweepRun],
        arguments: Sequence[str] = (),
        say: Callable[[str], object] = print,
        show: Callable[[str], object] | None = None,
    ) -> None:
        self.config, self.folder, self.runs = config, folder, list(runs)
        self._arguments, self._say, self._show = list(arguments), say, show
        self._signals = 0
        self._others: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Make the folder, or read the states of the runs that it has; raise a `UserError` if it is another's."""
        try:
            known = self._known()
            nofollow_folder(self.folder)
            nofollow_folder(self.folder / LOGS)
        except OSError as error:
            raise UserError(f"--sweep-dir {shown(self.folder)} cannot be written: {error.strerror}.") from None
        names = {run.name for run in self.runs}
        self._others = [found for name, found in known.items() if name not in names]  # of other values
        for run in self.runs:
            found = known.get(run.name, {})
            same = found.get("settings") == list(run.overrides) and found.get("config") == run.config
            if same and found.get("state") == FINISHED:
                run.state = FINISHED

    def make(self, jobs: int) -> None:
        """Make the runs that are not finished, at most `jobs` at a time, until all have ended or a signal came."""
        waiting, going = [run for run in self.runs if run.state != FINISHED], list[SweepRun]()
        if done := len(self.runs) - len(waiting):
            self._say(f"{done} of {len(self.runs)} runs are finished already.")
        with self._forwarding(going):
            while going or (waiting and not self._signals):
                while waiting and len(going) < jobs and not self._signals:
                    going.append(self._start(waiting.pop(0)))
                time.sleep(_POLL)
                for run in [each for each in going if each.process is not None and each.process.poll() is not None]:
                    going.remove(run)
                    self._end(run)
                if self._show is not None:
                    self._show("; ".join(f"{self._place(run)} {progress_of(self.folder / run.name)}" for run in going))

    @property
    def was_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self._signals > 0

    def _start(self, run: SweepRun) -> SweepRun:
        settings = [part for each in run.overrides for part in ("--set", each)]
        command = [
            sys.executable,
            "-m",
            "threefold",
            "train",
            str(self.config),
            "--run-dir",
            str(self.folder / run.name),
        ]
        self._say(f"{self._place(run)} starts")
        with open(open_nofollow(self._log(run), os.O_APPEND), "ab") as log:
            run.process = subprocess.Popen(  # apart from this terminal, whose Ctrl-C is passed on once
                [*command, "--resume=auto", *settings, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run.state, run.began = "", time.monotonic()
        return run

    def _end(self, run: SweepRun) -> None:
        assert run.process is not None
        status, run.process = run.process.returncode, None
        took = clock(time.monotonic() - run.began)
        if status == 0 and not self._signals:
            run.state = FINISHED
            self._say(f"{self._place(run)} finished in {took}: {progress_of(self.folder / run.name)}")
        elif self._signals:
            run.state = STOPPED
            self._say(f"{self._place(run)} stopped after {took}: {progress_of(self.folder / run.name)}")
        else:
            run.state, run.reason = FAILED, self._last_line(run) or f"it ended with status {status}"
            self._say(f"{self._place(run)} failed after {took}: {run.reason}")
        self._write()

    def _place(self, run: SweepRun) -> str:
        return f"{self.runs.index(run) + 1}/{len(self.runs)}  {run.name}"

    def _log(self, run: SweepRun) -> Path:
        return self.folder / LOGS / f"{run.name}.log"

    def _last_line(self, run: SweepRun) -> str:
        with suppress(OSError), FolderFiles(self.folder / LOGS).record(f"{run.name}.log") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            told = [line for line in lines if line.startswith("Error")]
            return on_one_line((told or lines or [""])[-1].removeprefix("Error: "))
        return ""

    def _known(self) -> dict[str, dict[str, Any]]:
        files = FolderFiles(self.folder)
        if not self.folder.is_dir() or not files.holds(SWEEP_FILE):
            others = (
                [] if not self.folder.is_dir() else [each.name for each in self.folder.iterdir() if each.name != LOGS]
            )
            if others:
                raise UserError(
                    f"--sweep-dir {shown(self.folder)} has {shown(others[0])} but no {SWEEP_FILE}, so it is not of a "
                    "sweep; use another folder."
                )
            return {}
        try:
            read = load_json(files.text(SWEEP_FILE))
            return {str(run["name"]): run for run in read["runs"]}
        except (ValueError, KeyError, TypeError, UserError):
            self._say(f"Warning: {shown(self.folder / SWEEP_FILE)} is damaged; each run looks at its own checkpoints.")
            return {}

    def _write(self) -> None:
        kept = [
            {"name": run.name, "settings": [hide_secrets(each) for each in run.overrides], "config": run.config}
            | {"state": run.state, "reason": run.reason}
            for run in self.runs
        ]
        fresh = self.folder / f"{SWEEP_FILE}.tmp"
        try:
            document = {"format": "threefold-sweep", "runs": [*self._others, *kept]}
            write_nofollow(fresh, json.dumps(document, indent=1) + "\n")
            fresh.replace(self.folder / SWEEP_FILE)
        except OSError as error:
            raise UserError(f"--sweep-dir {shown(self.folder)} cannot be written: {error.strerror}.") from None

    @contextmanager
    def _forwarding(self, going: Sequence[SweepRun]) -> Iterator[None]:
        """Pass on to the runs the signals that end this process; they save a checkpoint and end."""

        def pass_on(number: int, frame: object) -> None:
            self._signals += 1
            for run in going:
                if run.process is not None:
                    run.process.send_signal(number)

        self._write()
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def progress_of(folder: Path) -> str:
    """Return the last losses of a run in words."""
    last: dict[str, Any] = {}
    valid: dict[str, Any] = {}
    with suppress(OSError):
        for line in read_metrics(folder / "metrics.jsonl"):
            last, valid = (line, valid) if "loss" in line else (last, line)
    if not last:
        return "no step yet"
    told = f"step {last['step']:,}, loss {'not finite' if last['loss'] is None else format(last['loss'], '.4f')}"
    return told + ("" if valid.get("valid_loss") is None else f", validation {valid['valid_loss']:.4f}")


def outcomes(runs: Sequence[SweepRun], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a sweep for its page: `columns`, and `rows` from the best loss to the worst.

    The best loss is the lowest validation loss, or if no run has one, the lowest training loss.
    """
    found = {run["name"]: run for run in document["runs"]}
    evaluates = any(_values(run["evaluations"]["values"], "valid_loss", "mean") for run in document["runs"])
    rows = []
    for run in runs:
        curves = found[run.name]["curves"]["values"] if run.name in found else {}
        checked = found[run.name]["evaluations"]["values"] if run.name in found else {}
        loss, valid = _values(curves, "loss", "mean"), _values(checked, "valid_loss", "mean")
        lowest = _values(checked, "valid_loss", "low") if evaluates else _values(curves, "loss", "low")
        best = min(lowest, default=None)
        numbers = [loss[-1] if loss else None, valid[-1] if valid else None, best]
        rows.append([run.name, *run.settings.values(), run.state or "not begun", *numbers])
    rows.sort(key=lambda row: (row[-1] is None, row[-1]))
    settings = list(runs[0].settings) if runs else []
    return {"columns": ["run", *settings, "state", "loss", "validation", "best"], "rows": rows}


def _values(curves: Mapping[str, Any], name: str, kind: str) -> list[float]:
    found = curves.get(name, {})
    return [each for each in found.get(kind, found.get("mean", ())) if each is not None]
