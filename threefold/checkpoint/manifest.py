"""Manifest of a checkpoint (checkpoint.json): the state of the run, and the size and checksum of every file."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final, get_args

from threefold.checkpoint.errors import DamagedCheckpoint, is_plain_name, whole
from threefold.checksums import checksum, is_intact, seal_text
from threefold.data.content_checksums import CONTENT_DTYPES, Content
from threefold.data.tokenizer import BEFORE_RULES, SpecialTokens, TextRule
from threefold.errors import UserError
from threefold.files import parse_json, read_text, require_file, shown
from threefold.output import sync, write_durably

MANIFEST: Final = "checkpoint.json"
PARTIAL: Final = ".partial"
"""Suffix of the folder of an incomplete checkpoint."""
REPLACED: Final = ".replaced"
"""Suffix of a complete checkpoint being replaced; it counts until the new one has its name."""
FORMAT: Final = "threefold-checkpoint"
VERSION: Final = 2


@dataclass(frozen=True)
class AnomalyFacts:
    """A run's response to anomalous steps so far (`threefold.resilience.anomalies`).

    Attributes:
        skipped: first and last step of each range that a rollback skipped.
        skips: total number of steps skipped by a policy.
        consecutive: number of skipped steps in a row up to now.
        recent: loss and gradient norm of the last updates, the reference for detecting spikes.
    """

    skipped: tuple[tuple[int, int], ...] = ()
    skips: int = 0
    consecutive: int = 0
    rollbacks: int = 0
    recent: tuple[tuple[float, float], ...] = ()


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

    step: int
    consumed_samples: int
    seed: int
    eod: int | None
    tokenizer_sha256: str | None
    tokens: int
    documents: int
    loss_scale: float | None = None
    good_steps: int = 0
    corpora: tuple[tuple[int, int], ...] = ()
    contents: tuple[Content, ...] = ()
    special_tokens: SpecialTokens | None = None
    beginning: tuple[int, ...] | None = None
    anomalies: AnomalyFacts | None = None
    evaluation_missed: bool = False

    @property
    def rule(self) -> TextRule | None:
        """Rule by which the text of the data became tokens; None for an import."""
        if not self.documents:
            return None
        if self.beginning is None:
            return BEFORE_RULES
        return TextRule(self.special_tokens or "parse", self.beginning, self.special_tokens is None)


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum of a file; version 1 had no checksums."""

    bytes: int
    checksum: str | None


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
        """Compare a file with its checksum, if it has one; raise DamagedCheckpoint if they differ."""
        written = self.files[name].checksum
        try:
            if written is not None and checksum(self.folder / name) != written:
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
    if version != 1 and not is_intact(text):
        raise DamagedCheckpoint(folder, f"its {MANIFEST} does not have the checksum that it was written with")
    if type(version) is int and version > VERSION:
        raise UserError(
            f"{folder} has version {version} of the format and this Threefold reads versions 1 to {VERSION}; use a "
            "later Threefold."
        )
    try:
        if version not in (1, VERSION) or type(version) is not int:
            raise ValueError("version")
        if version == VERSION:
            document.pop("checksum")
        files = {name: _file(name, held, version) for name, held in document.pop("files").items()}
        facts = _facts(document)
        if folder.name.partition(".")[0] != f"step_{facts.step:08d}":  # a suffix tells the state
            raise ValueError("step")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(folder, f"its {MANIFEST} has no usable {_first_word(error)}") from None
    return Manifest(folder, facts, files)


def write_manifest(folder: Path, facts: Facts) -> None:
    """Write checkpoint.json durably, completing the checkpoint; raise DamagedCheckpoint for a damaged tensor index."""
    from threefold.checkpoint.index import read_data_files

    known = read_data_files(folder)
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "checksum": known[path.name].checksum if path.name in known else checksum(path),
        }
        for path in paths
    }
    stored = dataclasses.asdict(facts)
    for name in ("anomalies", "evaluation_missed"):
        if not stored[name]:  # so that earlier versions can read the manifest
            del stored[name]
    manifest = {"format": FORMAT, "version": VERSION, **stored, "files": files}
    write_durably(folder / MANIFEST, seal_text(json.dumps(manifest, indent=2)))
    sync(folder)


def _file(name: str, held: Any, version: int) -> FileRecord:
    if not is_plain_name(name) or name == MANIFEST:
        raise ValueError("files")
    if version == 1:
        return FileRecord(_checked("files", held, _is_whole), None)
    return FileRecord(
        _checked("files", held["bytes"], _is_whole),
        _checked("files", held["checksum"], lambda value: isinstance(value, str)),
    )


def _is_whole(value: Any) -> bool:
    try:
        return whole(value) == value
    except ValueError:
        return False


def _is_scale(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and isfinite(value) and value > 0)


def _is_pairs(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(_is_whole(number) for pair in value for number in pair)


def _is_contents(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(content, dict)
        and content.keys() | {"loss_mask"} == {"dtype", "documents", "tokens", "loss_mask"}
        and content["dtype"] in CONTENT_DTYPES
        and isinstance(content["documents"], str)
        and isinstance(content["tokens"], str | None)
        and isinstance(content.get("loss_mask"), str | None)
        for content in value
    )


def _is_anomalies(value: Any) -> bool:
    counts = ("skips", "consecutive", "rollbacks")
    return (
        isinstance(value, dict)
        and value.keys() == {"skipped", "recent", *counts}
        and _is_pairs(value["skipped"])
        and all(_is_whole(value[name]) for name in counts)
        and isinstance(value["recent"], list)
        and all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in value["recent"])
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


_RULES: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("step", "consumed_samples", "seed", "tokens", "documents", "good_steps"), _is_whole),
    "eod": lambda value: value is None or _is_whole(value),
    "tokenizer_sha256": lambda value: value is None or isinstance(value, str),
    "loss_scale": _is_scale,
    "corpora": _is_pairs,
    "special_tokens": lambda value: value is None or value in get_args(SpecialTokens),
    "beginning": lambda value: value is None or (isinstance(value, list) and all(map(_is_whole, value))),
    "contents": _is_contents,
    "anomalies": _is_anomalies,
    "evaluation_missed": lambda value: isinstance(value, bool),
}
"""Validator of each field of `Facts` as read from JSON."""


def _facts(document: dict[str, Any]) -> Facts:
    """Return the facts in a manifest; raises ValueError with the name of the first invalid or missing field."""
    if unknown := document.keys() - _RULES.keys():
        raise ValueError(min(unknown))
    values = {name: _checked(name, value, _RULES[name]) for name, value in document.items()}
    if "corpora" in values:
        values["corpora"] = tuple((tokens, documents) for tokens, documents in values["corpora"])
    if values.get("beginning") is not None:
        values["beginning"] = tuple(values["beginning"])
    if "contents" in values:
        values["contents"] = tuple(Content(**content) for content in values["contents"])
    if "anomalies" in values:
        found = values["anomalies"]
        pairs = {name: tuple((one, other) for one, other in found[name]) for name in ("skipped", "recent")}
        values["anomalies"] = AnomalyFacts(**{**found, **pairs})
    if missing := [
        field.name
        for field in dataclasses.fields(Facts)
        if field.default is dataclasses.MISSING and field.name not in values
    ]:
        raise ValueError(missing[0])
    return Facts(**values)


def _checked(name: str, value: Any, rule: Callable[[Any], bool]) -> Any:
    if not rule(value):
        raise ValueError(name)
    return value


def _first_word(error: Exception) -> str:
    """Return the field named by a failed check or look-up, or `files`."""
    name = str(error).strip("'")
    return shown(name) if isinstance(error, (ValueError, KeyError)) and name else "files"
