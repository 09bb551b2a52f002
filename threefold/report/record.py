"""Record of a run: what its folder says about it, followed while the run goes on."""

import os
import re
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Final

from threefold.config.loading import parse_value, stored_text
from threefold.config.schema import DERIVED
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles, lines_of
from threefold.launch.run_folder import CONFIG_FILE, LOCK_FILE, Holder
from threefold.report.curves import Curves
from threefold.report.door import GOODPUT_FILE, METRICS_FILE
from threefold.report.goodput import Goodput
from threefold.report.metrics import Metrics, parse_line
from threefold.train.callbacks.step_log import LOG_FILE

SAMPLES_FILE: Final = "samples.jsonl"
_PLAIN: Final = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "tflops", "seconds", "waited", "loss_scale")
SUMS: Final = ("tokens", "read", "work", "capacity")
"""Values of steps of which only the total matters: tokens trained on, tokens read, a rank's model TFLOP, and the TFLOP
that it could have made at its peak rate in the time of the steps whose MFU is known."""
_EVENT: Final = re.compile(r"global step (\d+), ((?:rolled back|stopped|skipped).*)")


class RunRecord:
    """Record of a run in a folder; `update` reads what was written since.

    With `ended`, the run has made its last step although its lock is still held, as at its end.

    Attributes:
        curves: values of the steps: those of metrics.jsonl, `phase/NAME`, `term/NAME` and `SUMS`; `tokens_so_far` and
            `elapsed`, the seconds since the start of the run over all its attempts, are places of a step on other axes.
        evaluations: values of the evaluations: `valid_loss`, `valid_loss_average`, `valid_loss/NAME` and
            `valid_term/NAME`.
        logged, valid_logged: values that callbacks logged with steps, and with evaluations.
        recent: lines of the newest steps, oldest first.
        evaluation: line of the newest evaluation; None before the first.
        attempts: first step of each attempt but the first, and the seconds elapsed before it.
        ledgers: lines of the goodput at checkpoints.
        losses: loss of each step, the last one of a step that was made again.
        skips: first and last step of each range of skipped steps, and the reason.
    """

    def __init__(self, folder: Path, *, ended: bool = False) -> None:
        self.folder, self._ended, self._files = folder, ended, FolderFiles(folder)
        require_run(folder)
        self._inode = 0
        self._begin()

    def update(self) -> bool:
        """Read the new lines of the metrics, from the beginning if the run rewrote them; return whether there are any.

        A last line without its end is read when it is complete.
        """
        found = False
        try:
            if not self._files.holds(METRICS_FILE):
                return False
            with self._files.record(METRICS_FILE) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._begin()
                self._inode = status.st_ino
                file.seek(self._position)
                for content in (line for line in lines_of(file) if line.endswith(b"\n")):
                    found = True
                    self._position += len(content)
                    self._number += 1
                    self._read(content)
                self._cut = status.st_size > self._position
        except OSError as error:
            self._problem = str(error.strerror)
        return found

    @property
    def is_running(self) -> bool:
        """Whether a live process of this host, or one of another host, holds the lock of the folder."""
        holder = None if self._ended else Holder.read(self.folder / LOCK_FILE)
        return holder is not None and (holder.host != socket.gethostname() or holder.is_alive_here())

    @property
    def goodput(self) -> Goodput | None:
        return Goodput.read(self.folder / GOODPUT_FILE)

    def settings(self) -> tuple[dict[str, dict[str, Any]], str]:
        """Return the settings that the run recorded by section, and a sentence if they cannot be read."""
        try:
            return _recorded_settings(self.folder / CONFIG_FILE), ""
        except UserError as error:
            return {}, f"{str(error).removesuffix('.')}; the report is without the settings."

    def events(self) -> list[dict[str, Any]]:
        """Return what happened besides steps, by step: skipped steps, rollbacks, early stops."""
        found = [
            {"step": first, "text": f"skipped{f' to step {last:,}' if last > first else ''}: {reason}"}
            for first, last, reason in self.skips
        ]
        with suppress(OSError), self._files.record(LOG_FILE) as file:
            matches = filter(None, (_EVENT.match(line.decode(errors="replace")) for line in lines_of(file)))
            found += [{"step": int(match[1]), "text": match[2]} for match in matches if "skipped" not in match[2]]
        return sorted(found[-200:], key=lambda event: int(event["step"]))

    def warnings(self) -> list[str]:
        """Return a sentence for each thing that cannot be read as it was written."""
        path = self.folder / METRICS_FILE
        found = Metrics((), tuple(self._damaged)).warning(path)
        sentences = [] if found is None else [found.removeprefix("Warning: ").replace("are kept", "are used")]
        if self._cut and not self.is_running:
            sentences.append(f"The last line of {path} was cut short and is not used.")
        if self._problem:
            sentences.append(f"{path} cannot be read ({self._problem}).")
        return sentences

    def _begin(self) -> None:
        self.curves, self.evaluations, self.logged, self.valid_logged = Curves(), Curves(), Curves(), Curves()
        self.recent: deque[dict[str, Any]] = deque(maxlen=20)
        self.evaluation: dict[str, Any] | None = None
        self.attempts: list[tuple[int, float]] = []
        self.ledgers: list[dict[str, Any]] = []
        self.losses: dict[int, float] = {}
        self.skips: list[tuple[int, int, str]] = []
        self._position, self._number = 0, 0
        self._damaged: list[int] = []
        self._cut, self._problem = False, ""
        self._tokens = self._elapsed = self._clock = self._set_up = 0.0

    def _read(self, content: bytes) -> None:
        line, is_whole = parse_line(content)
        if not is_whole:
            self._damaged.append(self._number)
        if line is None:
            return
        if "loss" in line:
            self._read_step(line)
        elif "goodput" in line:
            self._read_ledger(line)
        elif "valid_loss" not in line:
            curves = self.logged if "logged" in line else self.valid_logged
            curves.add(line["step"], _members(line, "logged") | _members(line, "valid_logged"))
        else:
            self.evaluation = line
            values = {"valid_loss": line["valid_loss"]}
            if "valid_loss_average" in line:
                values["valid_loss_average"] = number(line, "valid_loss_average")
            values |= _members(line, "valid_losses", "valid_loss/") | _members(line, "valid_terms", "valid_term/")
            self.evaluations.add(line["step"], values)

    def _read_step(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if line.get("skipped") is True:
            reason = str(line.get("reason") or "the gradient overflowed")
            if self.skips and self.skips[-1][1:] == (step - 1, reason):
                self.skips[-1] = (self.skips[-1][0], step, reason)
            else:
                self.skips.append((step, step, reason))
        else:
            self._tokens += number(line, "tokens") or 0.0
        if not number(line, "tokens_per_second"):  # its samples were not read
            return
        clock = number(line, "wall_clock")
        if clock is not None:
            if clock < self._clock:
                self.attempts.append((step, self._elapsed))
                self._clock = 0.0
            self._elapsed += clock - self._clock
            self._clock = clock
        values = {name: number(line, name) for name in _PLAIN}
        values |= _members(line, "phases", "phase/") | _members(line, "terms", "term/")
        values["memory"] = number(line, "largest_memory") or number(line, "memory")
        seconds, rate, mfu = values["seconds"] or 0.0, values["tflops"] or 0.0, values["mfu"]
        values["read"] = seconds * (values["tokens_per_second"] or 0.0)
        values["work"] = seconds * rate
        values["capacity"] = seconds * rate / mfu if mfu else None
        values |= {"tokens": number(line, "tokens"), "tokens_so_far": self._tokens, "elapsed": self._elapsed}
        self.curves.add(step, values)
        if values["loss"] is not None:
            self.losses[step] = values["loss"]
        self.recent.append(line)

    def _read_ledger(self, line: dict[str, Any]) -> None:
        """Take the time of the whole run from its ledger: the metrics lack steps that were lost with an attempt."""
        seconds = _members(line, "seconds")
        set_up = (seconds.get("starting") or 0.0) + (seconds.get("lost") or 0.0)
        before = self.ledgers[-1] if self.ledgers else None
        if before is not None and set_up > self._set_up:
            start = before["step"] + 1  # a checkpoint was saved there, from which the attempt began
            if not any(step >= start for step, _ in self.attempts):
                self.attempts.append((start, before["seconds"].get("total") or 0.0))
        self._set_up = set_up
        self._elapsed = max(self._elapsed, seconds.get("total") or 0.0)
        kept = {"step": line["step"], "goodput": number(line, "goodput"), "seconds": seconds}
        while self.ledgers and self.ledgers[-1]["step"] >= kept["step"]:
            self.ledgers.pop()
        self.ledgers.append({**kept, "restarts": int(number(line, "restarts") or 0)})
        if len(self.ledgers) > 500:  # they are sums, so that every other one tells as much of the whole
            del self.ledgers[-2:0:-2]


def require_run(folder: Path) -> None:
    """Raise a `UserError` if a folder is not that of a run: it has neither metrics nor a config."""
    files = (METRICS_FILE, CONFIG_FILE, LOCK_FILE)
    if folder.is_dir() and any(map(FolderFiles(folder).holds, files)):
        return
    reason = f"not a folder of a run: it has no {METRICS_FILE} and no {CONFIG_FILE}"
    if not folder.is_dir():
        reason = "a file" if folder.is_file() else "not there"
    raise UserError(f"{shown(folder)} is {reason}; give a run folder, as for --run-dir.")


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a member of a JSON object that is a finite number; None for any other."""
    value = line.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond the floats
            return float(value) if isfinite(value) else None
    return None


def _members(line: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, float | None]:
    """Return the numbers of an object inside an object, with a prefix to their names."""
    inside = line.get(name)
    return {f"{prefix}{key}": number(inside, key) for key in inside} if isinstance(inside, dict) else {}


def _recorded_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings that a run's config.yaml records by section, unchecked, with the derived ones in comments."""
    lines = stored_text(path).split("\n")
    # A comment that begins a derived setting ends its first column with `#`.
    text = "\n".join(f" {line[3:]}" if line.startswith("  # ") and line != DERIVED else line for line in lines)
    read = parse_value(text, shown(path))
    sections = {str(name): values for name, values in read.items()} if isinstance(read, dict) else {}
    return {
        name: {shown(str(key)): value for key, value in values.items()}
        for name, values in sections.items()
        if isinstance(values, dict)
    }
