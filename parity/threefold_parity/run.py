"""Runs of a reference and of a candidate by their command lines, recorded and compared."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold_parity.compare import wide_problem
from threefold_parity.record import Record
from threefold_parity.recorder import AFTER, BYTES, FOLDER, LOAD, PERTURB, SAVE, STEPS, STOP, WIDE
from threefold_parity.text import UserError, shown

REFERENCE, CANDIDATE, WEIGHTS, IN_FP64 = "reference", "candidate", "weights", "wide"
NOISE: Final = "noise-{}"
_DOING: Final = {REFERENCE: "Reference", CANDIDATE: "Candidate"}
_LAST_LINES: Final = 8


@dataclass(frozen=True)
class RecordedRuns:
    """Records of the runs.

    Attributes:
        noisy: records of the reference with noise in the last place.
        wide: record of the reference in fp64; None without.
        note: reason for its absence, although the reference offers it; else empty.
    """

    reference: Record
    candidate: Record
    noisy: tuple[Record, ...]
    wide: Record | None = None
    note: str = ""


def run_both(
    reference: str,
    candidate: str,
    folder: Path,
    *,
    steps: int,
    noise: int,
    after: int = 0,
    whole: int = 0,
    wide: bool | None = None,
    timeout: float | None = None,
    whole_run: bool = False,
    tell: Callable[[str], None] = lambda doing: None,
) -> RecordedRuns:
    """Run both commands, one after the other, with the same initial weights unless records begin later.

    Args:
        reference, candidate: command lines; `{run}` in one is replaced by a folder for that run's files.
        folder: folder for the records, logs and weights, empty or missing.
        noise: number of further runs of the reference with noise, to learn tolerances.
        after: number of updates after which records begin; above 0, each run has its own weights.
        whole: bytes of tensors that each rank keeps whole.
        wide: whether the reference is run in fp64 too; None for where its script offers that.
        timeout: seconds that each run may take.
        whole_run: whether the scripts continue after the recorded steps.
        tell: called at the beginning of each run, with its description.

    Raises:
        UserError: a command cannot be started, fails, or records nothing; or `wide` is true and goes with other
            arguments or with the reference in none.
    """
    if wide and (after or not noise):
        reason = "--after, which gives each run weights of its own" if after else "--noise 0, to whose runs it adds one"
        raise UserError(f"--wide does not go with {reason}; leave out one.")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out {shown(folder)} is not empty; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    commands = {"--reference": _split("--reference", reference), "--candidate": _split("--candidate", candidate)}
    base = {STEPS: str(steps), AFTER: str(after), BYTES: str(whole), **({} if whole_run else {STOP: "1"})}
    weights = str((folder / WEIGHTS).absolute())

    def one(option: str, name: str, **more: str) -> Record:
        tell(_DOING.get(name, f"Reference, {name}"))
        place = folder / name
        variables = {**base, FOLDER: str(place.absolute()), **more}
        words = [word.replace("{run}", str(place.with_suffix(".files").absolute())) for word in commands[option]]
        _run(option, words, place, variables, timeout)
        try:
            return Record(place)
        except UserError as error:
            if (place / "rank-00000.json").exists():
                raise
            raise UserError(
                f"The command of {option} ended without a record: its script must make a parity.Recorder of the model "
                f"and train a step (its output is in {shown(place.with_suffix('.log'))})."
            ) from error

    first = one("--reference", REFERENCE, **({} if after else {SAVE: weights}))
    given = {} if after else {LOAD: weights}
    noisy = tuple(
        one("--reference", NOISE.format(number), **given, **{PERTURB: str(number)}) for number in range(1, noise + 1)
    )
    in_fp64, note = None, ""
    if wide or (wide is None and noise and not after and first.facts.get("offers_wide")):
        try:
            in_fp64 = one("--reference", IN_FP64, **given, **{WIDE: "1", STEPS: "1"})
            if problem := wide_problem(first, in_fp64):
                in_fp64 = None
                raise UserError(f"The command of --reference does not compute in fp64: {problem}.")
        except UserError as error:
            note = f"In fp64, t{str(error)[1:]}"
            if wide:
                raise UserError(f"{note.removesuffix('.')}; leave out --wide.") from error
    return RecordedRuns(first, one("--candidate", CANDIDATE, **given), noisy, in_fp64, note)


def _split(option: str, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{option} {shown(command)} cannot be split into words ({error}); close its quotes.") from None
    if not words:
        raise UserError(f"{option} is empty; give a command line, such as 'python train.py'.")
    return words


def _run(option: str, words: list[str], place: Path, variables: Mapping[str, str], timeout: float | None) -> None:
    log = place.with_suffix(".log")
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{option} cannot be started: {words[0]}: {error.strerror}.") from None
        try:
            status = process.wait(timeout)
        except BaseException as error:
            for number in (signal.SIGTERM, signal.SIGKILL):  # to the run and all its processes
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                    break
            if isinstance(error, subprocess.TimeoutExpired):
                raise UserError(
                    f"The command of {option} did not end within {timeout:g} s (--timeout); its output is in "
                    f"{shown(log)}."
                ) from None
            raise
    if status:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
        said = next((line.strip() for line in reversed(last) if line.strip()), "nothing")
        raise UserError(
            f"The command of {option} ended with {how}; its last line was: {shown(said)} (all is in {shown(log)})."
        )
