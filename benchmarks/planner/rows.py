"""Published training steps in `published/steps/`, as configs with measured seconds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from threefold.config import Config, resolve
from threefold.config.loading import config_of

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FOLDER = Path(__file__).parent / "published" / "steps"


@dataclass(frozen=True)
class Row:
    """Published training step.

    Attributes:
        file, title: location in `published/steps/`.
        hardware: name in the catalogue.
        system: system that ran it, a name of `threefold.planner.systems`.
        seconds: seconds of a step; None if it ran out of memory.
        given: whether this project's reference gives it in full.
    """

    file: str
    title: str
    source: str
    hardware: str
    system: str
    sections: dict[str, dict[str, Any]]
    seconds: float | None
    given: bool

    def config(self) -> Config:
        return resolve(config_of(self.sections), self.sections["model"].get("vocab_size", 1))

    @property
    def layout(self) -> str:
        """Describe what distinguishes the row from others of its title."""
        parallel, train = self.sections["parallel"], self.sections["train"]
        sizes = "·".join(
            f"{axis}{parallel[axis]}" for axis in ("dp", "pp", "cp", "ep", "tp") if parallel.get(axis, 1) > 1
        )
        return f"{sizes} micro {train.get('micro_batch_size')}" + (" sp" if parallel.get("sequence_parallel") else "")


def published_rows() -> list[Row]:
    """Return every row, in the order of the files."""
    return [row for path in sorted(FOLDER.glob("*.yaml")) for row in _of_file(path)]


def _of_file(path: Path) -> Iterator[Row]:
    for table in yaml.load(path.read_text(), _LOADER):
        for values in table["rows"]:
            named = dict(zip(table["columns"], values, strict=True))
            seconds, model = named.pop("seconds"), named.pop("model", None)
            sections: dict[str, dict[str, Any]] = {"data": {"path": "tokens"}, "parallel": {}, "train": {}}
            for section, settings in table["settings"].items():
                sections[section] = {**sections.get(section, {}), **settings}
            sections["model"] = {**sections.get("model", {}), **table.get("models", {}).get(model, {})}
            for key, value in named.items():
                section, name = key.split(".")
                sections[section][name] = value
            _complete(sections, table.get("world"))
            given = table.get("given", False)
            title = table["title"] if model is None else f"{table['title']}: {model}"
            yield Row(
                path.stem,
                title,
                table["source"],
                table["hardware"],
                table["system"],
                sections,
                seconds,
                given is True or (given is not False and model in given),
            )


def _complete(sections: dict[str, dict[str, Any]], world: int | None) -> None:
    """Fill in the replicas for a world size, and the schedule for several stages per rank."""
    parallel = sections["parallel"]
    if world is not None:
        parallel["dp"] = world // (parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1))
    if parallel.get("tp", 1) == 1:
        parallel.pop("sequence_parallel", None)  # it has nothing to shard
    if parallel.get("dp", 1) == 1:
        parallel.pop("zero", None)
    if parallel.get("stage_chunks", 1) > 1:
        parallel["schedule"] = "interleaved"
    else:
        parallel.pop("stage_chunks", None)
