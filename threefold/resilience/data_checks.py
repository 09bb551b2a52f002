"""Checks of what ranks share: a run's terms, its folder, samples within a replica and not across them, token files."""

import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import numpy as np

from threefold.checkpoint.folder import from_first
from threefold.checkpoint.manifest import Checkpoint
from threefold.checkpoint.resume import other_text
from threefold.checksums import checksum_of_blocks
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.data.corpus import Content, Corpus, TokenArray, damaged
from threefold.data.dataset import Dataset
from threefold.data.formats.custom_data import CustomData, named
from threefold.data.keyed_reading import fingerprint_of
from threefold.data.loader import Batch, Loader
from threefold.data.samples import Samples
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles, write_nofollow
from threefold.models.source import ModelSource
from threefold.resilience.data_agreement import require_one_data_set
from threefold.resilience.terms import agree_on_terms
from threefold.train.attachment import Checks
from threefold.train.callbacks.base import Callback, say
from threefold.train.callbacks.records import EvaluationRecord


class RankChecks(Checks):
    """Checks that the ranks of a run have the same terms, share its folder and read the samples that they should."""

    def __init__(self, config: Config, dataset: Dataset, reads: bool) -> None:
        super().__init__(config, dataset, reads)
        self._tokens: TokenCheck | None = None

    def on_start(self, samples: Iterable[Samples | None], source: ModelSource, heartbeat: Heartbeat) -> list[str]:
        return agree_on_terms(self.config, self.dataset, samples, source, heartbeat)

    def on_mesh(self, mesh: Mesh) -> None:
        require_same_custom_data(self.dataset, mesh)

    def on_folder(self, run_dir: Path, mesh: Mesh) -> None:
        require_shared_folder(run_dir, mesh, self.reads)

    def callbacks(self, mesh: Mesh, loader: Loader, resumed: Checkpoint | None) -> Sequence[Callback]:
        every = self.config.log.every
        self._tokens = TokenCheck(mesh, self.dataset.contents(), every, resumed, self.reads)
        compared = [DataCheck(mesh, every, loader.slice.rows.tolist())] if mesh.world.size > 1 else []
        return [*compared, self._tokens]

    def contents(self) -> tuple[Content, ...]:
        return super().contents() if self._tokens is None else self._tokens.contents()


def require_same_custom_data(dataset: Dataset, mesh: Mesh) -> None:
    """Check that the custom data sets of a run are the same on every rank. Collective over the world."""
    for data in (source.data for source in dataset.sources):
        if isinstance(data, CustomData):
            for part in data.parts.values():
                require_one_data_set(part, mesh, f"{named(data.path)}, which")


def require_shared_folder(run_dir: Path, mesh: Mesh, looks: bool = True) -> None:
    """Check that all hosts share the run's folder, into which all ranks write checkpoints. Collective over the world.

    `looks` tells whether this rank looks there for its host. Raises a `UserError` on every rank that names the hosts.
    """
    world, here = mesh.world, (gethostname(), os.path.realpath(run_dir))
    if world.size == 1:
        return

    def begin() -> tuple[str, tuple[str, str]]:
        name = f".shared-{secrets.token_hex(8)}"
        try:
            write_nofollow(run_dir / name, "")
        except OSError as error:
            raise UserError(f"Cannot write to --run-dir {shown(run_dir)}: {error.strerror}.") from None
        return name, here

    name, first = from_first(world, begin)
    until, lacks = time.monotonic() + _SLOW_FOLDER, looks
    while lacks and (lacks := not FolderFiles(run_dir).holds(name)) and time.monotonic() < until:
        time.sleep(0.1)
    others = [(rank, *place) for rank, place in enumerate(world.gather_objects(here if lacks else None)) if place]
    if world.is_first:
        with suppress(OSError):
            (run_dir / name).unlink()
    if others:
        rank, host, folder = others[0]
        raise UserError(
            f"--run-dir is {shown(first[1])} of host {shown(first[0])} on rank 0, but another folder, "
            f"{shown(folder)} of host {shown(host)}, on rank {rank:,}; all ranks write the checkpoints there, so name "
            "a folder that all hosts share."
        )


_SLOW_FOLDER: Final = 3.0
"""Seconds until a file that another host has made is there, on a shared file system."""


class DataCheck(Callback):
    """Compare fingerprints of the ranks' batches in the first step and every `every` steps; a mismatch ends the run.

    Runs on every rank, as it calls a collective. `rows` are the rank's rows of the global batch, for batches without
    rows. Raises a `UserError` on every rank, naming a rank that reads different samples.
    """

    def __init__(self, mesh: Mesh, every: int, rows: Sequence[int] = ()) -> None:
        self.mesh, self.every, self.rows = mesh, every, tuple(rows)

    def before_step(self, step: int, batch: Any) -> None:
        self.step_interval = self.every
        mine = fingerprint_of(batch if isinstance(batch, Batch) else (batch, self.rows))
        found = [number for (number,) in self.mesh.world.gather_numbers(self.mesh.device, mine)]
        if problem := disagreement(found, self.mesh.layout):
            raise UserError(f"At step {step} {problem}.")


def disagreement(fingerprints: list[int], layout: Layout) -> str | None:
    """Describe the first mismatch between the ranks' fingerprints, as a clause; None if there is none."""
    usual: dict[int, int] = {}
    for replica, ranks in enumerate(layout.groups("pp", "cp", "tp")):
        common, _ = Counter(fingerprints[rank] for rank in ranks).most_common(1)[0]
        for rank in ranks:
            if fingerprints[rank] != common:
                place = layout.coordinates(rank)
                named = f"dp {place.dp}, pp {place.pp}, tp {place.tp}" + (f", cp {place.cp}" if layout.cp > 1 else "")
                others = "the others of its replica; give every host the same files at data.path"
                return f"rank {rank} ({named}) read other samples than {others}"
        if common in usual:
            return f"the replicas dp {usual[common]} and dp {replica} read the same samples; each must have its own"
        usual[common] = replica
    return None


_READING, _DONE, _PROBLEMS = 0, 1, 2
"""States of a rank's reader; values from `_PROBLEMS` on are the number of a problem."""
_DAMAGED, _OTHER, _UNREADABLE = range(3)
WORTH_WAITING: Final = 4 << 30
"""Number of unread bytes up to which a checkpoint and the end of the run wait for the reader, which takes seconds."""
_LOOK: Final = 0.5  # seconds between two looks at the reader's progress while waiting for it


class TokenCheck(Callback):
    """Read all tokens in the background, and end the run on all ranks at the same step if a checksum differs.

    Checksums are compared with those in the files and with those in the checkpoint that the run resumes from. One rank
    of each host reads, at the lowest scheduling priority. Every `every` steps the ranks exchange their states.
    Collective over the world; raises a `UserError` on every rank, naming the file.
    """

    def __init__(
        self,
        mesh: Mesh,
        corpora: Sequence[Corpus],
        every: int,
        resumed: Checkpoint | None,
        reads: bool,
        wait_for: int = WORTH_WAITING,
    ) -> None:
        self.mesh, self.corpora, self.resumed = mesh, corpora, resumed
        self.step_interval = every if mesh.world.size > 1 else 1
        self._wait_for = wait_for
        self._found: list[str | None] = [None] * len(corpora)
        self._problem = 0
        self._left = sum(corpus.tokens.nbytes for corpus in corpora)
        self._settled = self._stopped = False
        self._reader = threading.Thread(target=self._read, name="threefold-token-check", daemon=True) if reads else None

    def before_fit(self, start: int) -> None:
        if self._reader is not None:
            self._reader.start()

    def before_step(self, step: int, batch: Any) -> None:
        self._agree()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._agree()

    def after_fit(self) -> None:
        self._wait()
        self._agree()
        if not self._settled and self._reader is not None and self.mesh.rank == 0:
            total = sum(corpus.tokens.nbytes for corpus in self.corpora)
            say(
                f"The run ended when {1 - self._left / total:.0%} of its tokens had been checked; "
                "`threefold data verify` checks them all."
            )

    def close(self) -> None:
        self._stopped = True

    def contents(self) -> tuple[Content, ...]:
        """Return the known checksums of each corpus, or raise a `UserError` if one differs.

        Waits for the reader first if at most `wait_for` bytes are left.
        """
        self._wait()
        if self._problem:
            raise self._error(self._problem)
        return tuple(
            replace(corpus.content, tokens=corpus.content.tokens or found)
            for corpus, found in zip(self.corpora, self._found, strict=True)
        )

    def _wait(self) -> None:
        reader, seen = self._reader, -1
        if reader is None or reader.ident is None or self._left > self._wait_for:
            return
        while reader.is_alive():
            reader.join(_LOOK)
            if self._left != seen:  # a slow disk takes long, and the other ranks wait for this one
                seen = self._left
                self.mesh.heartbeat.progress()

    def _agree(self) -> None:
        if self._settled:
            return
        reading = self._reader is not None and self._reader.is_alive()
        mine = self._problem or (_READING if reading else _DONE)
        mesh = self.mesh
        table = mesh.world.gather_numbers(mesh.device, mine) if mesh.world.size > 1 else [[mine]]
        found = [number for (number,) in table]
        if max(found) >= _PROBLEMS:
            raise self._error(max(found))
        if min(found) == _DONE:
            self._settled, self.step_interval = True, 0
            self._compare_hosts()

    def _compare_hosts(self) -> None:
        """Compare the checksums that all hosts' readers computed; raises a `UserError` on every rank. Collective."""
        if self.mesh.world.size == 1:
            return
        mine = 0 if self._reader is None else 1 + fingerprint_of(self._found) // 2  # zero for a rank that reads none
        numbers = [each for (each,) in self.mesh.world.gather_numbers(self.mesh.device, mine)]
        readers = [rank for rank, number in enumerate(numbers) if number]
        other = next((rank for rank in readers if numbers[rank] != numbers[readers[0]]), None)
        if other is not None:
            raise UserError(
                f"The hosts of rank {readers[0]} and rank {other} have different tokens at data.path; give every host "
                "the same files."
            )

    def _error(self, problem: int) -> UserError:
        number, kind = divmod(problem - _PROBLEMS, 3)
        file, remedy = self.corpora[number].files[0], self.corpora[number].remedy
        if kind == _OTHER and self.resumed is not None:
            return other_text(file, self.resumed)
        if kind == _UNREADABLE:
            return UserError(f"{shown(file)} cannot be read to its end; {remedy}")
        return UserError(damaged(file, remedy))

    def _read(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for number, corpus in enumerate(self.corpora):
            if (kind := self._problem_of(number, corpus)) is not None:
                self._problem = _PROBLEMS + 3 * number + kind
                return

    def _problem_of(self, number: int, corpus: Corpus) -> int | None:
        written, dtype = corpus.content.tokens, corpus.content.dtype
        then = self.resumed.facts.contents[number] if self.resumed and self.resumed.facts.contents else None
        try:
            self._found[number] = found = checksum_of_tokens(corpus.tokens, dtype, self._advance)
            if written is not None and found != written:
                return _DAMAGED
            if then is None or then.tokens is None:
                return None
            if then.dtype != dtype:
                found = checksum_of_tokens(corpus.tokens, then.dtype, lambda size: self._advance(0))
            return None if found == then.tokens else _OTHER
        except _Stopped:
            return None
        except UserError:
            return _UNREADABLE

    def _advance(self, size: int) -> None:
        self._left -= size
        if self._stopped:
            raise _Stopped


class _Stopped(Exception):
    pass


def checksum_of_tokens(tokens: TokenArray, dtype: str, advance: Callable[[int], None] = lambda size: None) -> str:
    """Compute the checksum of tokens as stored in a type. Raises UserError if their file cannot be read."""
    little = np.dtype(dtype).newbyteorder("<")

    def blocks() -> Iterator[memoryview]:
        step = max(1, (8 << 20) // tokens.dtype.itemsize)
        for start in range(0, len(tokens), step):
            block = np.ascontiguousarray(tokens[start : start + step])
            yield memoryview(np.ascontiguousarray(block.astype(little, copy=False)).data)
            advance(block.nbytes)

    return checksum_of_blocks(blocks())
