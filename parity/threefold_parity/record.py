"""Record of a run: the files in which each rank keeps each step, and the initial weights, with their readers.

A rank writes `rank-00000-step-0001.safetensors` for each step (0: before the first), with the values of all pieces in
one vector and their index in the metadata, and `rank-00000.json` with the facts of the run. No rank waits for another.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from threefold_parity.facts import FORMAT, VERSION, read_facts
from threefold_parity.files import TensorFile, checksum, load_json, save_tensors, seal
from threefold_parity.placement import Piece, Placement
from threefold_parity.sketch import COPY, PARAMETER, SAMPLE, WHOLE, Kept, keep, kept_size, length
from threefold_parity.text import UserError, shown

INITIAL, BUFFER, OUTPUT, OUTPUT_GRADIENT = "initial weight", "buffer", "output", "output gradient"
GRADIENT, UPDATE, STATE, TENSOR = "gradient", "update", "optimizer state", "tensor"
"""Kinds of recorded quantities; a state's name is `exp_avg of blocks.0.weight`."""
KINDS: Final = (INITIAL, BUFFER, OUTPUT, OUTPUT_GRADIENT, GRADIENT, UPDATE, TENSOR)
DETAILS: Final = {"parameter": PARAMETER, "sample": SAMPLE, "copy": COPY, "whole": WHOLE}
"""Amounts that are kept of a tensor, by their names in the index."""
_SPARE: Final = 1 << 24
"""Values that tensors may take beyond what ranks keep of them, and the size that a dim may have in any case."""
_FACTS_FILE: Final = re.compile(r"rank-\d{5,}\.json")
_SHARED: Final = (OUTPUT, OUTPUT_GRADIENT, GRADIENT, UPDATE, STATE)
"""Kinds that have equal shares of the bytes of whole tensors; tensors of other kinds count with the states."""


class IndexEntry(NamedTuple):
    """A line of the index, in the order of its fields: a piece of a tensor, or of one activation for several samples.

    Attributes:
        name: name in the whole model.
        order: position in the order of recording within the step.
        shape: shape of the whole tensor; for an activation, that of one sample.
        detail: one of `DETAILS`.
        copy, partial: as in the placement.
        samples: for an activation, the fingerprint of each sample.
    """

    kind: str
    name: str
    order: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    detail: str
    copy: int
    partial: bool
    samples: tuple[str, ...] | None

    @property
    def piece(self) -> Piece:
        return Piece(self.start, self.start, self.size)

    @property
    def values(self) -> int:
        """Number of values of each sample."""
        return length(self.shape, self.piece, DETAILS[self.detail])

    @property
    def usual(self) -> str:
        """Name of the detail of a tensor that is not kept whole."""
        return "parameter" if self.samples is None else "sample"

    def lowered(self, values: Tensor) -> tuple["IndexEntry", Tensor]:
        """Return the entry of a tensor that is whole here as one of the usual detail, and its values."""
        elements = values[1:].view(1, *self.size)
        return self._replace(detail=self.usual), keep(elements, self.shape, self.piece, DETAILS[self.usual])[0]

    @classmethod
    def from_json(cls, values: list[Any]) -> "IndexEntry":
        kind, name, order, shape, start, size, detail, copy, partial, samples = values
        known = kind in KINDS or (isinstance(kind, str) and kind.startswith(f"{STATE} "))
        texts = [name, *(samples or ())]
        numbers = [order, copy, *shape, *start, *size]
        if not known or detail not in DETAILS or not all(isinstance(each, str) for each in texts):
            raise ValueError(kind)
        if not all(type(each) is int and each >= 0 for each in numbers) or type(partial) is not bool:
            raise ValueError(name)
        at = tuple(shape), tuple(start), tuple(size)
        if not all(first + extent <= whole for whole, first, extent in zip(*at, strict=True)):
            raise ValueError(name)
        return cls(kind, name, order, *at, detail, copy, partial, None if samples is None else tuple(samples))


@dataclass
class Page:
    """Quantities that a rank has recorded in the current step.

    Tensors are kept whole within a budget of bytes. Each of several kinds (`_SHARED`) has the same share of it, and its
    tensors are whole in the order of recording, as long as they fit; the size of a tensor is that in the whole model,
    so that ranks that shard it decide alike.
    """

    budget: int = 0
    entries: list[IndexEntry] = field(default_factory=list, init=False)
    values: list[Tensor] = field(default_factory=list, init=False)
    _taken: dict[str, int] = field(default_factory=dict, init=False)

    def add(self, kind: str, name: str, tensor: Tensor, placement: Placement) -> None:
        boxes = [(piece, piece.of(tensor)[None]) for piece in placement.pieces]
        self._add(kind, [placement.name or name], placement, placement.shape, boxes, tensor.element_size(), None)

    def add_samples(
        self, kind: str, names: list[str], rows: Tensor, placement: Placement, samples: tuple[str, ...]
    ) -> None:
        """Keep an activation, or the gradient of one, under the names of all modules that it belongs to.

        `rows` are (samples, …); the placement is that of the rows within the whole activation, including the dim of
        samples.
        """
        boxes = []
        for piece in placement.pieces:
            of_rows = Piece((0, *piece.local[1:]), piece.start, (len(rows), *piece.size[1:]))
            boxes.append((Piece(piece.local[1:], piece.start[1:], piece.size[1:]), of_rows.of(rows)))
        self._add(kind, names, placement, placement.shape[1:], boxes, rows.element_size(), samples)

    def _add(
        self,
        kind: str,
        names: list[str],
        placement: Placement,
        shape: tuple[int, ...],
        boxes: list[tuple[Piece, Tensor]],
        element_size: int,
        samples: tuple[str, ...] | None,
    ) -> None:
        usual, count = ("parameter", 1) if samples is None else ("sample", len(samples) * len(names))
        detail = "copy" if placement.copy else usual
        if not placement.copy and prod(shape) > DETAILS[usual].elements:  # whole, if that fits
            share = kind if kind in _SHARED else STATE
            taken = self._taken.get(share, 0) + count * prod(shape) * max(element_size, 4)
            if taken <= self.budget // len(_SHARED):
                self._taken[share], detail = taken, "whole"
        for piece, box in boxes:
            kept = keep(box, shape, piece, DETAILS[detail]).reshape(-1)
            for name in names:
                at = kind, name, len(self.entries), shape, piece.start, piece.size, detail
                self.entries.append(IndexEntry(*at, placement.copy, placement.partial, samples))
                self.values.append(kept)

    def drop(self, kind: str) -> None:
        """Discard the quantities of a kind, so that they can be recorded again."""
        kept = [at for at, entry in enumerate(self.entries) if entry.kind != kind]
        self.entries = [self.entries[at] for at in kept]
        self.values = [self.values[at] for at in kept]

    def save(self, path: Path) -> None:
        """Write the page; in fp32, or in fp64 if a tensor of it is."""
        index = json.dumps(self.entries, separators=(",", ":"))
        values = torch.cat(self.values) if self.values else torch.zeros(0)
        save_tensors(path, {"values": values}, {"format": FORMAT, "index": index})


def page_file(rank: int, step: int) -> str:
    return f"rank-{rank:05d}-step-{step:04d}.safetensors"


def facts_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def write_facts(folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
    """Write the facts of a rank; numbers that JSON lacks become text."""
    path = folder / facts_file(rank)
    staged = path.with_suffix(".tmp")
    document = seal({"format": FORMAT, "version": VERSION, "rank": rank, **_encoded(facts)})
    staged.write_text(json.dumps(document, indent=1), encoding="utf-8")
    staged.replace(path)


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _encoded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


Key = tuple[str, str, str]
"""Kind, name, and for an activation the sample's fingerprint, otherwise empty."""


@dataclass
class Quantity:
    """A tensor of the whole model at a step, assembled from the parts that ranks kept.

    Attributes:
        order: position in the order of recording.
        owners: each piece, with its rank.
        copies: rank, entry and values of each further copy.
    """

    kind: str
    name: str
    sample: str
    order: int
    kept: Kept
    owners: list[tuple[Piece, int]] = field(default_factory=list)
    copies: list[tuple[int, IndexEntry, Tensor]] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Number of elements that no rank recorded."""
        return prod(self.kept.shape) - self.kept.covered

    def lowered(self) -> "Quantity":
        """Return a tensor that is whole here in the usual detail, if no element is missing."""
        if self.kept.detail != WHOLE or self.missing:
            return self
        kept = self.kept.lowered(SAMPLE if self.sample else PARAMETER)
        copies = [
            (rank, *(entry.lowered(values) if entry.detail == "whole" else (entry, values)))
            for rank, entry, values in self.copies
        ]
        return replace(self, kept=kept, copies=copies)


def align(pages: Sequence[dict[Key, Quantity]]) -> None:
    """Lower the detail of tensors that other records of the same step have in a lower one."""
    for key in pages[0]:
        details = {page[key].kept.detail for page in pages if key in page}
        if len(details) > 1:
            for page in pages:
                if key in page:
                    page[key] = page[key].lowered()


class Record:
    """Opened record of a run.

    Attributes:
        ranks: facts of each rank.
        facts: facts of rank 0.
        steps: number of steps that every rank has recorded.

    Raises:
        UserError: the folder is not a record, lacks a rank, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"There is no record at {shown(folder)}; give the folder that THREEFOLD_PARITY named.")
        first = folder / facts_file(0)
        if not first.is_file():
            what = "has no rank-00000.json" if any(folder.iterdir()) else "is empty"
            raise UserError(
                f"The folder {shown(folder)} {what}: no run recorded there, or rank 0 ended before its first step; "
                "give the folder of a record."
            )
        world = read_facts(first, 0)["world_size"]
        present = {path.name for path in folder.iterdir()}
        absent = next((rank for rank in range(world) if facts_file(rank) not in present), None)
        if absent is not None:
            more = world - len([name for name in present if _FACTS_FILE.fullmatch(name)]) - 1
            raise UserError(
                f"The record {shown(folder)} is of {world:,} ranks but lacks rank {absent}"
                f"{f' and {more:,} more' if more > 0 else ''}; let every rank record into one folder."
            )
        self.ranks = [read_facts(folder / facts_file(rank), rank) for rank in range(world)]
        self.facts = self.ranks[0]
        self.steps = min(facts["steps"] for facts in self.ranks)
        for facts in self.ranks:
            if facts["world_size"] != world:
                raise UserError(
                    f"The record {shown(folder)} holds ranks of two runs: rank {facts['rank']} is of "
                    f"{facts['world_size']} ranks and rank 0 of {world}; record each run into a folder of its own."
                )

    def step(self, step: int) -> dict[Key, Quantity]:
        """Return the quantities recorded at a step, from 1; 0 for before the first. UserError if a file is damaged."""
        parts: dict[Key, list[tuple[int, IndexEntry, Tensor]]] = {}
        for rank in range(len(self.ranks)):
            for entry, values in self._page(rank, step):
                for number, sample in enumerate(entry.samples or ("",)):
                    parts.setdefault((entry.kind, entry.name, sample), []).append((rank, entry, values[number]))
        found: dict[Key, Quantity] = {}
        for key, entries in parts.items():
            details = {entry.detail for _, entry, _ in entries if not entry.copy} or {entries[0][1].usual}
            for rank, entry, values in entries:
                if len(details) > 1 and entry.detail == "whole":  # other ranks had no room for their parts of it
                    entry, values = entry.lowered(values)
                if key not in found:
                    detail = entry.usual if len(details) > 1 else next(iter(details))
                    found[key] = Quantity(*key, entry.order, Kept.empty(entry.shape, DETAILS[detail]))
                quantity, place = found[key], (entry.start, entry.size)
                if quantity.kept.shape != entry.shape:
                    raise UserError(
                        f"The record {shown(self.folder)} has {entry.kind} {entry.name} with the whole shape "
                        f"{quantity.kept.shape} on one rank and {entry.shape} on rank {rank}; let the adapter give "
                        "both the shape in the whole model."
                    )
                same = [owner for piece, owner in quantity.owners if (piece.start, piece.size) == place]
                if entry.copy or (same and not (entry.partial and rank not in same)):
                    quantity.copies.append((rank, entry, values))
                    continue
                covered = quantity.kept.covered
                quantity.kept.add(entry.piece, values, entry.partial)
                if same:  # another rank's part of a sum
                    quantity.kept.covered = covered
                quantity.owners.append((entry.piece, rank))
        return found

    def _page(self, rank: int, step: int) -> Iterator[tuple[IndexEntry, Tensor]]:
        path = self.folder / page_file(rank, step)
        if not path.is_file():
            raise UserError(
                f"The record {shown(self.folder)} lacks step {step} of rank {rank}: the run ended before, or "
                f"{path.name} was removed; compare fewer steps with --steps {max(step - 1, 1)}."
            )
        try:
            if checksum(path) != self.ranks[rank]["checksums"][step]:
                raise ValueError(path)
            file = TensorFile(path)
            index, values = load_json(file.facts["index"]), file.tensor("values")
            entries = [IndexEntry.from_json(line) for line in index]
            if values.dim() != 1 or not values.is_floating_point():
                raise ValueError(values.shape)
            # Ranks together keep the projections and the grid of a whole tensor: a larger one is of no run.
            room = _SPARE + 4 * len(self.ranks) * len(values)
            wanted = (kept_size(each.shape, DETAILS[each.detail]) * len(each.samples or ("",)) for each in entries)
            if max((size for each in entries for size in each.shape), default=0) > room or sum(wanted) > room:
                raise ValueError(room)
            at = 0
            for entry in entries:
                count = entry.values * (1 if entry.samples is None else len(entry.samples))
                if at + count > len(values):
                    raise ValueError(at)
                yield entry, values[at : at + count].view(-1, entry.values)
                at += count
        except (OSError, LookupError, ValueError, TypeError, RuntimeError):
            raise UserError(
                f"The record {shown(self.folder)} is damaged: {path.name} cannot be read; record the run again."
            ) from None


def write_weights(
    folder: Path, rank: int, world_size: int, parameters: Iterable[tuple[str, list[tuple[Tensor, Placement]]]]
) -> None:
    """Write a rank's parts of the weights; copies of what another rank writes are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    index: list[list[Any]] = []
    for name, parts in parameters:
        for tensor, placement in parts:
            for piece in () if placement.copy else placement.pieces:
                key = str(len(index))
                tensors[key] = piece.of(tensor)
                index.append([placement.name or name, list(placement.shape), list(piece.start), list(piece.size)])
    path = folder / f"weights-{rank:05d}.safetensors"
    staged = path.with_suffix(".tmp")
    save_tensors(staged, tensors, {"index": json.dumps(index), "world_size": str(world_size)})
    staged.replace(path)


def read_weights(folder: Path) -> Callable[[str], Tensor]:
    """Return a function from a parameter's name to its whole value.

    Raises:
        UserError: now or later, if a file is missing or damaged, or the reference has no parameter of that name.
    """
    files = sorted(folder.glob("weights-*.safetensors"))
    parts: dict[str, list[tuple[Path, str, tuple[int, ...], Piece]]] = {}
    try:
        for path in files:
            facts = TensorFile(path).facts
            if int(facts["world_size"]) != len(files):
                raise KeyError("world_size")
            for key, (name, shape, start, size) in enumerate(load_json(facts["index"])):
                piece = Piece(tuple(start), tuple(start), tuple(size))
                parts.setdefault(name, []).append((path, str(key), tuple(shape), piece))
    except (OSError, LookupError, ValueError, TypeError):
        parts = {}
    if not parts:
        raise UserError(
            f"The initial weights in {shown(folder)} are missing or cut; let the reference run write them "
            "(THREEFOLD_PARITY_SAVE) and end its first step."
        )

    def read(name: str) -> Tensor:
        if name not in parts:
            raise UserError(
                f"The reference has no parameter {name}; it has {', '.join(sorted(parts)[:3])}, …: give both runs one "
                "model, or let the adapter return the reference's names."
            )
        found = [TensorFile(path).tensor(key) for path, key, _, _ in parts[name]]
        shape = parts[name][0][2]
        lacking = prod(shape) - sum(prod(piece.size) for piece in {piece for *_, piece in parts[name]})
        if lacking > 0:
            raise UserError(
                f"The initial weights in {shown(folder)} lack {lacking:,} elements of {name}; let every rank of the "
                "reference write its parts, and its adapter place them all."
            )
        value = torch.empty(shape, dtype=found[0].dtype)
        for (*_, piece), part in zip(parts[name], found, strict=True):
            value[piece.box] = part
        return value

    return read
