"""Records in a checkpoint: its manifest, checkpoint.json, and the record of its writer, writer.json.

An imported checkpoint has no writer; its layout is read from `config.yaml`.
"""

import dataclasses
import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import yaml
from pydantic import Field

from threefold.checkpoint.errors import CHANGED, DamagedCheckpoint
from threefold.checkpoint.index import FINGERPRINT, read_data_files
from threefold.checksums import FileRecord, checksum, checksum_of_file, is_intact, seal_text
from threefold.comm.layout import AXES, Layout
from threefold.config.schema import ParallelConfig
from threefold.data.corpus import Content
from threefold.data.tokenizer import SpecialTokens, TextRule
from threefold.errors import UserError
from threefold.files import STRICT, WrongFact, parse_facts, parse_json, shown
from threefold.foreign import FORMAT, MANIFEST, FolderFiles, is_plain_name
from threefold.output import sync, write_durably

PARTIAL: Final = ".partial"  # suffix of the folder of an incomplete checkpoint
REPLACED: Final = ".replaced"
"""Suffix of a complete checkpoint being replaced; it counts until the new one has its name."""
VERSION: Final = 1

Whole = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True)
class AnomalyFacts:
    """A run's response to anomalous steps so far (`threefold.resilience.anomalies`)."""

    skipped: tuple[tuple[Whole, Whole], ...] = ()  # first and last step of each range that a rollback skipped
    skips: Whole = 0  # steps skipped by a policy in total
    consecutive: Whole = 0  # steps skipped in a row up to now
    rollbacks: Whole = 0
    recent: tuple[tuple[float, float], ...] = ()  # loss and gradient norm of the last updates, to detect spikes
    __pydantic_config__: ClassVar[Any] = STRICT


@dataclass(frozen=True)
class Facts:
    """State of a run besides its tensors, after `step` updates.

    With the config and the tensors, this is the whole training state: the next batch, every dropout mask and the
    learning rate are functions of the seed and the step.
    """

    step: Whole
    consumed_samples: Whole
    seed: Whole
    eod: Whole | None
    tokenizer_sha256: str | None
    tokens: Whole  # of the data, like the documents
    documents: Whole
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    good_steps: Whole = 0  # finite steps since the loss scale changed last
    corpora: tuple[tuple[Whole, Whole], ...] = ()  # tokens and documents of each corpus of the data
    contents: tuple[Content, ...] = ()  # of the corpora
    # Text rule of the data; None in imports, which have seen no data.
    special_tokens: SpecialTokens | None = None
    beginning: tuple[Whole, ...] | None = None
    anomalies: AnomalyFacts | None = None
    # Of a mixture: samples read of each corpus, and by how much that is less than its weights say (`data.order.Blend`).
    blend: tuple[tuple[Whole, Annotated[str, Field(pattern=r"^-?[0-9]+(/[1-9][0-9]*)?$")]], ...] = ()
    # Metric of `checkpoint.keep_best` and its value after these updates; None if it was not measured or not finite.
    measured: tuple[str, float] | None = None
    evaluation_missed: bool = False  # the run ended before an evaluation that was due after these updates
    # Hash of all weights, the same in every layout (docs/exact.md), of an exact run.
    fingerprint: Annotated[str, Field(pattern=f"^{FINGERPRINT}$")] | None = None
    __pydantic_config__: ClassVar[Any] = STRICT

    @property
    def rule(self) -> TextRule | None:
        """Rule that turned the text of the data into tokens; None for an import."""
        if self.beginning is None:
            return None
        return TextRule(self.special_tokens or "parse", self.beginning, self.special_tokens is None)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, and the facts and the files in its manifest."""

    path: Path
    facts: Facts
    files: Mapping[str, FileRecord] = field(default_factory=dict)  # empty where ranks exchange it: a file of each rank

    @property
    def step(self) -> int:
        return self.facts.step

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent

    def check_sizes(self) -> None:
        found = FolderFiles(self.path, {name: file.bytes for name, file in self.files.items()})
        for name, file in self.files.items():
            try:
                size = found.size(name)
            except OSError as error:
                reason = "leads out of its folder" if error.errno == errno.ELOOP else "is missing or no file"
                raise DamagedCheckpoint(self.path, f"its {shown(name)} {reason}") from None
            if size != file.bytes:
                raise DamagedCheckpoint(
                    self.path, f"its {shown(name)} has {size:,} bytes and was written with {file.bytes:,}"
                )

    def check_content(self, name: str) -> None:
        try:
            with FolderFiles(self.path, {name: self.files[name].bytes}).opened(name) as file:
                found = checksum_of_file(file)
            if found != self.files[name].checksum:
                raise DamagedCheckpoint(self.path, f"its {shown(name)} {CHANGED}")
        except OSError as error:
            raise DamagedCheckpoint(self.path, f"its {shown(name)} cannot be read ({error.strerror})") from None


def read_manifest(folder: Path) -> Checkpoint:
    """Read checkpoint.json and no other file; UserError if it is of another version of the format."""
    try:
        text = FolderFiles(folder).text(MANIFEST)
        document = parse_json(text, MANIFEST)
    except UserError as error:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} cannot be read ({str(error).removesuffix('.')})") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} is not that of a checkpoint")
    version = document.pop("version", None)
    if not is_intact(text):
        raise DamagedCheckpoint(folder, f"its {MANIFEST} {CHANGED}")
    if type(version) is int and version > 0 and version != VERSION:
        raise UserError(
            f"{folder} has version {version} of the format and this Threefold reads version {VERSION}; use the "
            "Threefold that wrote it."
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
        if folder.name.partition(".")[0] != f"step_{facts.step:08d}":  # a suffix marks the state
            raise WrongFact("step", document)
    except WrongFact as wrong:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} has no usable {shown(wrong.name)}") from None
    return Checkpoint(folder, facts, files)


def write_manifest(folder: Path, facts: Facts) -> None:
    """Write checkpoint.json durably, completing the checkpoint; raise DamagedCheckpoint for a damaged tensor index."""
    known = read_data_files(folder)
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            found = known[path.name].checksum if path.name in known else checksum(path)
            files[path.name] = {"bytes": path.stat().st_size, "checksum": found}
    stored = dataclasses.asdict(facts)
    for name in ("blend", "measured"):
        if not stored[name]:
            del stored[name]
    manifest = {"format": FORMAT, "version": VERSION, **stored, "files": files}
    write_durably(folder / MANIFEST, seal_text(json.dumps(manifest, indent=2)))
    sync(folder)


WRITER: Final = "writer.json"
_WRITER_FORMAT: Final = "threefold-writer"


@dataclass(frozen=True)
class WriterRecord:
    """Record of the run that wrote a checkpoint; None for what is unknown."""

    layout: Mapping[str, Any] | None = None  # `parallel` settings
    saved: datetime | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # of the package and of torch
    weights_only: bool = False  # the optimizer state was left out on purpose

    @property
    def ranks(self) -> int | None:
        return None if self.layout is None else prod(int(self.layout.get(axis, 1)) for axis in AXES)

    @property
    def text(self) -> str:
        document = {
            "format": _WRITER_FORMAT,
            "version": 1,
            "saved": self.saved.isoformat(timespec="seconds") if self.saved else None,
            "layout": None if self.layout is None else dict(self.layout),
            "versions": dict(self.versions),
            "weights_only": self.weights_only,
        }
        return json.dumps(document, indent=2) + "\n"

    def __str__(self) -> str:
        """Return the layout on one line, such as `dp 2 · tp 2 · pp 2, zero 1`."""
        if self.layout is None:
            return "unknown"
        sizes = {axis: int(self.layout.get(axis, 1)) for axis in (*AXES, "ep")}
        zero, schedule = self.layout.get("zero", 0), self.layout.get("schedule")
        more = [f"zero {zero}"] if zero else []
        more += [str(schedule)] if schedule and sizes["pp"] > 1 else []
        return ", ".join((str(Layout(**sizes)), *more))


def record_of(layout: ParallelConfig | Layout) -> WriterRecord:
    """Return the record for a checkpoint written now by a run with these settings, or by a custom training loop."""
    axes = ("dp", "tp", "pp", "cp", "ep")
    if isinstance(layout, Layout):
        known: dict[str, Any] = {axis: layout.size(axis) for axis in axes}
    else:
        settings = layout.settings()
        kept = (*axes, "zero", "zero_shards", "schedule", "stage_chunks", "sequence_parallel")
        known = {name: settings[name] for name in kept if name in settings}
    versions = {}
    for package in ("threefold", "torch"):
        with suppress(PackageNotFoundError):  # run from a folder of sources
            versions[package] = version(package)
    return WriterRecord(known, datetime.now(UTC), versions)


def read_writer(folder: Path) -> WriterRecord:
    """Return the record of a checkpoint's writer, for an imported one from the config; unreadable facts are None."""
    document, files = None, FolderFiles(folder)
    with suppress(UserError):
        document = files.json(WRITER)
    if not isinstance(document, dict) or document.get("format") != _WRITER_FORMAT:
        document = None
        with suppress(UserError, yaml.YAMLError, ValueError, RecursionError):
            document = yaml.safe_load(files.text("config.yaml"))
        return WriterRecord(_usable(document.get("parallel", {})) if isinstance(document, dict) else None)
    versions, saved = document.get("versions"), None
    with suppress(KeyError, TypeError, ValueError):
        saved = datetime.fromisoformat(document["saved"])
    return WriterRecord(
        _usable(document.get("layout")),
        saved.replace(tzinfo=saved.tzinfo or UTC) if saved else None,
        {str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else {},
        document.get("weights_only") is True,
    )


def _usable(layout: Any) -> dict[str, Any] | None:
    if not isinstance(layout, dict):
        return None
    known = {axis: layout.get(axis, 1) for axis in (*AXES, "ep")}
    if not all(type(size) is int and 1 <= size < 1 << 31 for size in known.values()):
        return None
    return layout if known["dp"] % known["ep"] == 0 else None
