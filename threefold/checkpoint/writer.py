"""The file writer.json of a checkpoint: when, by which layout and by which versions it was written.

It is not needed to open a checkpoint. It is a separate file because earlier releases refuse a manifest with unknown
fields. Older checkpoints lack it; their layout is read from `config.yaml`.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, Final

import yaml

from threefold.comm.layout import AXES, Layout
from threefold.config.schema import ParallelConfig
from threefold.errors import UserError
from threefold.files import read_json, read_text

WRITER: Final = "writer.json"
_FORMAT: Final = "threefold-writer"


@dataclass(frozen=True)
class WriterRecord:
    """Record of the run that wrote a checkpoint.

    Attributes:
        layout: `parallel` settings that describe the run's layout, by name; None if unknown.
        saved: time of saving; None if unknown.
        versions: versions of the package and of torch, by name.
        weights_only: whether the optimizer state was left out on purpose.
    """

    layout: Mapping[str, Any] | None = None
    saved: datetime | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    weights_only: bool = False

    @property
    def ranks(self) -> int | None:
        """Number of processes that wrote the checkpoint; None if unknown."""
        return None if self.layout is None else prod(int(self.layout.get(axis, 1)) for axis in AXES)

    @property
    def text(self) -> str:
        """Content of writer.json."""
        document = {
            "format": _FORMAT,
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


def record_of(parallel: ParallelConfig) -> WriterRecord:
    """Return the record for a checkpoint written now by a run with these settings."""
    settings = parallel.settings()
    kept = ("dp", "tp", "pp", "cp", "ep", "zero", "zero_shards", "schedule", "stage_chunks", "sequence_parallel")
    return _record_now({name: settings[name] for name in kept if name in settings})


def record_of_layout(layout: Layout) -> WriterRecord:
    """Return the record for a checkpoint written now by a custom training loop."""
    return _record_now({axis: layout.size(axis) for axis in ("dp", "tp", "pp", "cp", "ep")})


def _record_now(layout: Mapping[str, Any]) -> WriterRecord:
    versions = {}
    for package in ("threefold", "torch"):
        with suppress(PackageNotFoundError):  # run from a folder of sources
            versions[package] = version(package)
    return WriterRecord(layout, datetime.now(UTC), versions)


def read_writer(folder: Path) -> WriterRecord:
    """Return the record of a checkpoint's writer, for older checkpoints from the config; unreadable facts are None."""
    document = None
    with suppress(UserError):
        document = read_json(folder / WRITER)
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return WriterRecord(_layout_of_config(folder))
    versions = document.get("versions")
    return WriterRecord(
        _usable(document.get("layout")),
        _time(document.get("saved")),
        {str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else {},
        document.get("weights_only") is True,
    )


def _layout_of_config(folder: Path) -> dict[str, Any] | None:
    """Return the layout in the stored config.yaml, or None if unreadable."""
    try:
        document = yaml.safe_load(read_text(folder / "config.yaml"))
    except (UserError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return _usable(document.get("parallel", {})) if isinstance(document, dict) else None


def _usable(layout: Any) -> dict[str, Any] | None:
    if not isinstance(layout, dict):
        return None
    known = {axis: layout.get(axis, 1) for axis in (*AXES, "ep")}
    if not all(type(size) is int and 1 <= size < 1 << 31 for size in known.values()):
        return None
    return layout if known["dp"] % known["ep"] == 0 else None


def _time(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
