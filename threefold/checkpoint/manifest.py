"""Manifest of a checkpoint (checkpoint.json): the state of the run, and the size and checksum of every file."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from threefold.checkpoint.errors import DamagedCheckpoint, is_plain_name
from threefold.data.content_checksums import Content
from threefold.data.tokenizer import BEFORE_RULES, SpecialTokens, TextRule
from threefold.errors import UserError
from threefold.files import (
    STRICT,
    FileRecord,
    WrongFact,
    checksum,
    is_intact,
    parse_facts,
    parse_json,
    read_text,
    require_file,
    seal_text,
    shown,
)
from threefold.output import sync, write_durably

MANIFEST: Final = "checkpoint.json"
PARTIAL: Final = ".partial"
"""Suffix of the folder of an incomplete checkpoint."""
REPLACED: Final = ".replaced"
"""Suffix of a complete checkpoint being replaced; it counts until the new one has its name."""
FORMAT: Final = "threefold-checkpoint"
VERSION: Final = 2

Whole = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True)
class AnomalyFacts:
    """A run's response to anomalous steps so far (`threefold.resilience.anomalies`).

    Attributes:
        skipped: first and last step of each range that a rollback skipped.
        skips: total number of steps skipped by a policy.
        consecutive: number of skipped steps in a row up to now.
        recent: loss and gradient norm of the last updates, the reference for detecting spikes.
    """

    skipped: tuple[tuple[Whole, Whole], ...] = ()
    skips: Whole = 0
    consecutive: Whole = 0
    rollbacks: Whole = 0
    recent: tuple[tuple[float, float], ...] = ()
    __pydantic_config__: ClassVar[Any] = STRICT


@dataclass(frozen=True)
class Facts:
    """State of a run besides its tensors, after `step` updates.

    With the config and the tensors, this is the whole training state: the next batch, every dropout mask and the
    learning rate are functions of the seed and the step.

    Attributes:
        consumed_samples: number of training samples read for these updates.
        eod: token id that ends a document; None if there is none.
        tokenizer_sha256: SHA-256 of tokenizer.json; None if there is none.
        tokens, documents: size of the data.
        loss_scale: loss scale of the next step; None without loss scaling.
        good_steps: number of steps for which the loss scale has held.
        corpora: tokens and documents of each corpus of the data.
        contents: content checksums of the corpora; empty in checkpoints of older versions.
        special_tokens: how text that spells a special token was encoded in the data; None if unknown, for older
            checkpoints and for imports, which have seen no data.
        beginning: tokens put before each text of the data; None for older checkpoints and imports.
        anomalies: response to anomalous steps; None if there is nothing to remember.
        evaluation_missed: whether the run ended before an evaluation that was due after these updates.
    """

    step: Whole
    consumed_samples: Whole
    seed: Whole
    eod: Whole | None
    tokenizer_sha256: str | None
    tokens: Whole
    documents: Whole
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    good_steps: Whole = 0
    corpora: tuple[tuple[Whole, Whole], ...] = ()
    contents: tuple[Content, ...] = ()
    special_tokens: SpecialTokens | None = None
    beginning: tuple[Whole, ...] | None = None
    anomalies: AnomalyFacts | None = None
    evaluation_missed: bool = False
    __pydantic_config__: ClassVar[Any] = STRICT

    @property
    def rule(self) -> TextRule | None:
        """Rule by which the text of the data became tokens; None for an import."""
        if not self.documents:
            return None
        if self.beginning is None:
            return BEFORE_RULES
        return TextRule(self.special_tokens or "parse", self.beginning, self.special_tokens is None)


@dataclass(frozen=True)
class Manifest:
    folder: Path
    facts: Facts
    files: Mapping[str, FileRecord]

    def check_sizes(self) -> None:
        """Check that all files exist with their recorded sizes; raise DamagedCheckpoint otherwise."""
        for name, file in self.files.items():
            try:
                size = require_file(self.folder / name)
            except UserError:
                raise DamagedCheckpoint(self.folder, f"its {shown(name)} is missing or no file") from None
            if size != file.bytes:
                raise DamagedCheckpoint(
                    self.folder, f"its {shown(name)} has {size:,} bytes and was written with {file.bytes:,}"
                )

    def check_content(self, name: str) -> None:
        """Compare a file with its checksum; raise DamagedCheckpoint if they differ."""
        try:
            if checksum(self.folder / name) != self.files[name].checksum:
                raise DamagedCheckpoint(
                    self.folder, f"its {shown(name)} does not have the checksum that it was written with"
                )
        except OSError as error:
            raise DamagedCheckpoint(self.folder, f"its {shown(name)} cannot be read ({error.strerror})") from None


def read_manifest(folder: Path) -> Manifest:
    """Read checkpoint.json and no other file.

    Raises:
        DamagedCheckpoint: the manifest is missing, was changed, or has impossible values.
        UserError: a later version of Threefold wrote it.
    """
    try:
        text = read_text(folder / MANIFEST)
        document = parse_json(text, MANIFEST)
    except UserError as error:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} cannot be read ({str(error).removesuffix('.')})") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} is not that of a checkpoint")
    version = document.pop("version", None)
    if version == 1 and type(version) is int:  # of development versions, and without a checksum
        raise DamagedCheckpoint(
            folder, f"its {MANIFEST} is of version 1 of the format, which is unknown: this Threefold reads {VERSION}"
        )
    if not is_intact(text):
        raise DamagedCheckpoint(folder, f"its {MANIFEST} does not have the checksum that it was written with")
    if type(version) is int and version > VERSION:
        raise UserError(
            f"{folder} has version {version} of the format and this Threefold reads version {VERSION}; use a later "
            "Threefold."
        )
    if type(version) is not int or version != VERSION:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} has no usable version")
    del document["checksum"]
    try:
        files = {name: parse_facts(FileRecord, held) for name, held in document.pop("files").items()}
        if not all(map(is_plain_name, files)) or MANIFEST in files:
            raise ValueError("files")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(folder, f"its {MANIFEST} has no usable files") from None
    try:
        facts = parse_facts(Facts, document)
        if folder.name.partition(".")[0] != f"step_{facts.step:08d}":  # a suffix tells the state
            raise WrongFact("step", document)
    except WrongFact as wrong:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} has no usable {shown(wrong.name)}") from None
    return Manifest(folder, facts, files)


def write_manifest(folder: Path, facts: Facts) -> None:
    """Write checkpoint.json durably, completing the checkpoint; raise DamagedCheckpoint for a damaged tensor index."""
    from threefold.checkpoint.index import read_data_files

    known = read_data_files(folder)
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "checksum": known[path.name].checksum if path.name in known else checksum(path),
        }
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    stored = dataclasses.asdict(facts)
    for name in ("anomalies", "evaluation_missed"):
        if not stored[name]:  # so that earlier versions can read the manifest
            del stored[name]
    manifest = {"format": FORMAT, "version": VERSION, **stored, "files": files}
    write_durably(folder / MANIFEST, seal_text(json.dumps(manifest, indent=2)))
    sync(folder)
