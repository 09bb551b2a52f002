"""Index of a checkpoint's tensors (tensors.json): its writer, its reader, and whether the tensors match a model.

Reading it does not import torch, so that commands that list checkpoints start at once.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from threefold.checkpoint.errors import AVERAGE, CHANGED, MODEL, DamagedCheckpoint, whole
from threefold.checksums import FileRecord, is_intact, seal_text
from threefold.config import Config
from threefold.errors import UserError
from threefold.files import parse_json, shown
from threefold.foreign import FolderFiles, is_plain_name

if TYPE_CHECKING:
    import torch


INDEX: Final = "tensors.json"
FORMAT: Final = "threefold-tensors"
VERSION: Final = 1
FINGERPRINT: Final = "[0-9a-f]{12}"
"""Pattern of fingerprints."""
_NAMES: Final = {
    1: ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"),
    2: ("float16", "bfloat16", "int16"),
    4: ("float32", "int32"),
    8: ("float64", "int64", "complex64"),
    16: ("complex128",),
}
ITEM_SIZES: Final = {name: size for size, names in _NAMES.items() for name in names}
"""Bytes of an element by the names of dtypes in the index, which are torch's."""


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor, with the index of its first element and its shape, and its position in a file in bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    bytes: int
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its global shape, stored dtype and chunks (none if it has no elements)."""

    shape: tuple[int, ...]
    dtype_name: str
    chunks: tuple[TensorChunk, ...] = ()

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES[self.dtype_name]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def name_of(dtype: "torch.dtype") -> str:
    """Return the name of a dtype in the index."""
    return str(dtype).removeprefix("torch.")


def index_text(
    tensors: Mapping[str, StoredTensor], files: Mapping[str, FileRecord], fingerprint: str | None = None
) -> str:
    """Return the content of tensors.json, which does not depend on the order in which ranks wrote.

    `fingerprint` is that of the weights, in every layout the same (`threefold.exact.tensor_hash`).
    """
    entries = (
        f"{json.dumps(name)}: "
        + json.dumps({"dtype": one.dtype_name, "shape": one.shape, "chunks": [vars(chunk) for chunk in one.chunks]})
        for name, one in sorted(tensors.items())
    )
    held = json.dumps({name: vars(files[name]) for name in sorted(files)})
    head = f'{{\n"format": "{FORMAT}",\n"version": {VERSION},\n"files": {held},\n'
    head += f'"fingerprint": {json.dumps(fingerprint)},\n"tensors": {{\n'
    return seal_text(head + ",\n".join(entries) + "\n}\n}")


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a checkpoint by name; DamagedCheckpoint if their chunks are not whole or not in its files."""
    files = FolderFiles(folder)
    document = _document(files)
    try:
        tensors = {
            name: StoredTensor(_sizes(entry["shape"]), _known(entry["dtype"]), tuple(map(_chunk, entry["chunks"])))
            for name, entry in document["tensors"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(folder, f"its {INDEX} lacks the position of a tensor") from None
    ends: dict[str, int] = {}
    for chunk in (chunk for each in tensors.values() for chunk in each.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.position + chunk.bytes)
    sizes = {name: _size(files, name) for name in ends}
    for name, tensor in tensors.items():
        if any(chunk.position + chunk.bytes > sizes[chunk.file] for chunk in tensor.chunks):
            raise DamagedCheckpoint(folder, f"the file of its tensor {shown(name)} ends before the tensor does")
        if not _covers(tensor):
            raise DamagedCheckpoint(folder, f"the parts of its tensor {shown(name)} do not make up the whole")
    if longer := [name for name, end in ends.items() if sizes[name] > end]:
        raise DamagedCheckpoint(folder, f"its {shown(min(longer))} goes on after the last of its tensors")
    for name, tensor in tensors.items():
        if any(chunk.bytes != prod(chunk.sizes) * tensor.itemsize for chunk in tensor.chunks):
            raise DamagedCheckpoint(folder, f"its {INDEX} has another length for a part of {shown(name)}")
    return tensors


def weight_names(folder: Path, average: bool = False, asks: str = "") -> dict[str, str]:
    """Return the names in the index of a checkpoint's weights and buffers, by their names in the model.

    With `average`, a weight that has a moving average is read from that; others are as they are, such as frozen ones.
    Raises a `UserError`, which begins with `asks`, if the checkpoint has no averages.
    """
    stored = read_index(folder)
    names = {name.removeprefix(MODEL): name for name in stored if name.startswith(MODEL)}
    if not average:
        return names
    averages = {name.removeprefix(AVERAGE): name for name in stored if name.startswith(AVERAGE)}
    if not averages:
        begin, option = (asks, "it") if asks else ("--average asks for averaged weights", "--average")
        raise UserError(f"{begin} but {folder} has none; leave {option} out, or train with optimizer.ema_decay 0.999.")
    return names | averages


def read_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of a checkpoint's weights; None if it is not known or the index is damaged."""
    with suppress(DamagedCheckpoint):
        found = _document(FolderFiles(folder)).get("fingerprint")
        return found if isinstance(found, str) and re.fullmatch(FINGERPRINT, found) else None
    return None


def read_data_files(folder: Path) -> dict[str, FileRecord]:
    """Read the size and checksum of each tensor file; raise DamagedCheckpoint if the index is damaged."""
    try:
        return {
            name: FileRecord(held["bytes"], held["checksum"])
            for name, held in _document(FolderFiles(folder))["files"].items()
        }
    except (KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(folder, f"its {INDEX} does not say which files hold the tensors") from None


def _document(files: FolderFiles) -> dict[str, Any]:
    folder = files.folder
    try:
        text = files.text(INDEX, limit=2 << 30)  # enough for some ten million chunks
        document = parse_json(text, str(folder / INDEX)) if (intact := is_intact(text)) else None
    except UserError as error:
        raise DamagedCheckpoint(folder, str(error).removesuffix(".")) from None
    if not intact:
        raise DamagedCheckpoint(folder, f"its {INDEX} {CHANGED}")
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise DamagedCheckpoint(folder, f"its {INDEX} is not of version {VERSION} of the format {FORMAT}")
    return document


def _size(files: FolderFiles, name: str) -> int:
    try:
        return files.size(name)
    except OSError as error:
        raise DamagedCheckpoint(files.folder, f"its {shown(name)} cannot be read ({error.strerror})") from None


def _known(dtype: Any) -> str:
    if dtype not in ITEM_SIZES:
        raise ValueError(f"{dtype!r} is not a dtype")
    return str(dtype)


def _chunk(entry: dict[str, Any]) -> TensorChunk:
    if not is_plain_name(entry["file"]) or not isinstance(entry["checksum"], str):
        raise ValueError("a chunk without a file or a checksum")
    box, place = (_sizes(entry["offsets"]), _sizes(entry["sizes"])), (whole(entry["position"]), whole(entry["bytes"]))
    return TensorChunk(*box, entry["file"], *place, entry["checksum"])


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError(f"{value!r} is not a shape")
    return tuple(map(whole, value))


def _covers(tensor: StoredTensor) -> bool:
    dims = len(tensor.shape)
    if any(len(chunk.offsets) != dims or len(chunk.sizes) != dims for chunk in tensor.chunks):
        return False
    if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.shape):
        return False
    if not dims:
        return len(tensor.chunks) == 1
    starts = np.array([chunk.offsets for chunk in tensor.chunks], dtype=np.int64).reshape(-1, dims)
    ends = starts + np.array([chunk.sizes for chunk in tensor.chunks], dtype=np.int64).reshape(-1, dims)
    if (ends > np.array(tensor.shape, dtype=np.int64)).any() or (ends <= starts).any():
        return False
    return not _overlap(starts, ends)


def _overlap(starts: Any, ends: Any) -> bool:
    """Return whether any two of the boxes from `starts` to `ends`, both [N, dims], share an element."""
    if len(starts) < 2:
        return False
    cut = int(np.argmax([len(np.unique(column)) for column in starts.T]))
    order = np.argsort(starts[:, cut], kind="stable")
    starts, ends = starts[order], ends[order]
    if all(end <= start for (_, end), (start, _) in pairwise(zip(starts[:, cut], ends[:, cut], strict=True))):
        return False
    for first in range(len(starts) - 1):
        rest = slice(first + 1, first + 1 + int(np.searchsorted(starts[first + 1 :, cut], ends[first, cut])))
        if ((starts[rest] < ends[first]) & (starts[first] < ends[rest])).all(axis=1).any():
            return True
    return False


_SIZES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "embed.tokens.weight": ("vocab_size", "hidden_size"),
    "embed.positions.weight": ("max_position_embeddings", None),
    "blocks.0.mlp.down.weight": (None, "ffn_hidden_size"),
}
"""Settings that determine the dims of a weight."""


Shapes = Mapping[str, tuple[int, ...]]


def size_mismatch(config: Config, stored: Shapes) -> str | None:
    """Return which size in a resolved config the stored weights do not have, as a clause; None if there is none.

    Single tensors are compared, without making the model, which may have a billion layers.
    """
    weights, model = _weights(stored), config.model
    layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    if len(layers) != model.num_layers:
        return f"its config has model.num_layers {model.num_layers} and its tensors are those of {len(layers)} layers"
    for name, keys in _SIZES.items():
        for key, size in zip(keys, weights.get(name, ()), strict=False):
            if key is not None and getattr(model, key) != size:
                return f"its config has model.{key} {getattr(model, key)} and its tensor {name} has {size}"
    return None


def model_mismatch(config: Config, stored: Shapes) -> str | None:
    """Return why the stored weights do not match a resolved config, as a clause; None if they match."""
    if (mismatch := size_mismatch(config, stored)) is not None:
        return mismatch
    import torch

    from threefold.models.source import ConfigSource

    weights = _weights(stored)
    try:
        make_model, _ = ConfigSource().load(config)
    except UserError as error:  # such as about adapters of layers that the model does not have
        return f"its config describes no model ({str(error).removesuffix('.')})"
    with torch.device("meta"):
        made = make_model()
    expected = {name: tuple(weight.shape) for name, weight in (*made.named_parameters(), *made.named_buffers())}
    if missing := expected.keys() - weights.keys():
        return f"its config describes a model with {min(missing)}, which is not among its tensors"
    if unknown := weights.keys() - expected.keys():
        return f"its tensors hold {min(unknown)}, which the model that its config describes does not have"
    for name, shape in expected.items():
        if (found := weights[name]) != shape:
            wanted = f"its config describes a model whose {name} is {_shown(shape)}"
            return f"{wanted} and its tensor of that name is {_shown(found)}"
    return None


def require_match(config: Config, checkpoint: Path) -> None:
    """Check that a checkpoint's weights match a custom model as its file defines it now."""
    import torch

    from threefold.models.source import ConfigSource
    from threefold.torch_private.distributed import persistent_buffers

    weights = _weights({name: tensor.shape for name, tensor in read_index(checkpoint).items()})
    make_model, plan = ConfigSource().load(config)
    with torch.device("meta"):
        made = make_model()
    expected = {plan.whole_name(name): tuple(weight.shape) for name, weight in made.named_parameters()}
    for prefix, module in made.named_modules():
        for name, buffer in persistent_buffers(module):
            expected[plan.whole_name(f"{prefix}.{name}" if prefix else name)] = tuple(buffer.shape)
    for name in [*expected, *sorted(weights.keys() - expected.keys())]:
        reason = None
        if name not in weights:
            reason = f"it has {name}, which the checkpoint lacks"
        elif name not in expected:
            reason = f"the checkpoint has {name}, which it lacks"
        elif weights[name] != expected[name]:
            reason = f"its {name} is {_shown(expected[name])} and the checkpoint's is {_shown(weights[name])}"
        if reason is not None:
            raise UserError(
                f"The model of {shown(config.model.file)} is not the one that {checkpoint} was made with: {reason}; "
                "restore the file, or start a new run in another folder."
            )


def _weights(stored: Shapes) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(MODEL): shape for name, shape in stored.items() if name.startswith(MODEL)}


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a number"
