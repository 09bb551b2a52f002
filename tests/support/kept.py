"""What a record keeps of a tensor that one rank holds whole, and records with other facts."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from threefold.checksums import checksum, seal
from threefold.parity.placement import whole
from threefold.parity.record import IndexEntry, page_file
from threefold.parity.sketch import Detail, Kept, keep


def kept_of(tensor: torch.Tensor, detail: Detail) -> Kept:
    shape = tuple(tensor.shape)
    found = Kept.empty(shape, detail)
    (piece,) = whole(tensor).pieces
    found.add(piece, keep(tensor[None], shape, piece, detail)[0])
    return found


def rewrite(record: Path, without: tuple[str, ...] = (), **facts: object) -> None:
    """Change facts of rank 0 of a record."""
    path = record / "rank-00000.json"
    left_out = ("checksum", *without)
    before = {name: value for name, value in json.loads(path.read_text()).items() if name not in left_out}
    path.write_text(json.dumps(seal({**before, **facts})))


def rewrite_index(record: Path, **fields: object) -> None:
    """Change the last entry of a record's first page, with the right checksum."""
    path = record / page_file(0, 0)
    with safe_open(path, "pt") as file:
        index, values = json.loads(file.metadata()["index"]), file.get_tensor("values")
    index[-1] = IndexEntry.from_json(index[-1])._replace(**fields)  # type: ignore[arg-type]
    save_file({"values": values}, path, metadata={"index": json.dumps(index)})
    checksums = json.loads((record / "rank-00000.json").read_text())["checksums"]
    rewrite(record, checksums=[checksum(path), *checksums[1:]])
