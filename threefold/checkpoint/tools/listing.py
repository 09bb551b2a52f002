"""`threefold checkpoint list`: the checkpoints of a run, each with its state."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import DIVERGED, LOOP
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, Facts, Manifest, read_manifest
from threefold.checkpoint.selection import inspect_checkpoint
from threefold.checkpoint.tools.locate import checkpoint_folders, step_of
from threefold.checkpoint.writer import WriterRecord, read_writer
from threefold.errors import UserError

State = Literal["complete", "damaged", "partial", "diverged"]
"""complete: has all its files, as far as is seen without reading tensors; partial: it is being written, or its writing
was interrupted; diverged: set aside, as the loss after it was not finite."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint of a list.

    Attributes:
        path: its folder.
        step: in its name.
        state: as of `State`.
        reason: what is damaged, as a clause; empty for other states.
        bytes: of all its files.
        saved: when; of an older one, when its manifest was last changed; None where there is none.
        facts: None where they cannot be read.
        writer: which layout wrote it.
    """

    path: Path
    step: int
    state: State
    reason: str
    bytes: int
    saved: datetime | None
    facts: Facts | None
    writer: WriterRecord

    @property
    def layout(self) -> str:
        """Of its writer on one line; of an imported model that it is one."""
        if self.facts is not None and self.facts.step == 0 and not self.facts.documents and not self.writer.versions:
            return "imported"
        return str(self.writer)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "path": str(self.path),
            "step": self.step,
            "state": self.state,
            "reason": self.reason,
            "bytes": self.bytes,
            "saved": self.saved.isoformat(timespec="seconds") if self.saved else None,
            "consumed_samples": self.facts.consumed_samples if self.facts else None,
            "layout": None if self.writer.layout is None else dict(self.writer.layout),
            "ranks": self.writer.ranks,
            "versions": dict(self.writer.versions),
            "weights_only": self.writer.weights_only,
        }


def list_checkpoints(run: Path) -> list[ListedCheckpoint]:
    """The checkpoints of a run by step, in whatever state.

    Raises:
        UserError: the folder cannot be read.
    """
    return [listed(path) for path in checkpoint_folders(run)]


def listed(path: Path) -> ListedCheckpoint:
    """A checkpoint with its state, all compared but the bytes of its tensors."""
    state: State = "complete"
    reason, facts = "", None
    try:
        manifest = read_manifest(path)
        facts = manifest.facts
        check(path, manifest)
        if path.name.endswith(DIVERGED):
            state = "diverged"
    except DamagedCheckpoint as damage:
        state, reason = "damaged", damage.reason
    except UserError as error:  # a later version of the format
        state, reason = "damaged", str(error).removesuffix(".")
    if path.name.endswith(PARTIAL):
        state, reason = "partial", ""
    writer = read_writer(path)
    return ListedCheckpoint(path, step_of(path), state, reason, size_of(path), saved_at(path, writer), facts, writer)


def saved_at(path: Path, writer: WriterRecord) -> datetime | None:
    """When a checkpoint was saved; of an older one when its manifest, or else its folder, was last changed."""
    return writer.saved or _changed(path / MANIFEST) or _changed(path)


def check(path: Path, manifest: Manifest) -> None:
    """Check all of a checkpoint but the bytes of its tensors, whoever wrote it.

    Raises:
        DamagedCheckpoint: it is not as it was written.
    """
    if LOOP not in manifest.files:
        inspect_checkpoint(path)
        return
    from threefold.checkpoint.format.storage import stored_index

    manifest.check_sizes()
    data = {chunk.file for tensor in stored_index(path).values() for chunk in tensor.chunks}
    for name in sorted(manifest.files.keys() - data):
        manifest.check_content(name)


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder; those that vanish meanwhile count nothing."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    try:
        for path in folder.iterdir():
            yield path.stat().st_size
    except OSError:
        return


def _changed(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None
