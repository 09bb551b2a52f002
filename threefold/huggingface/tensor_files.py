"""Reading a folder of safetensors, slice by slice."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from threefold.errors import UserError
from threefold.files import parse_json, read_text, require_file
from threefold.models.hf.config_json import shortened

_LOOKED_AT: Final = 1 << 20
"""Values that are checked together."""
WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE = re.compile(r"[\w@+=-][\w@+=., -]{0,240}\.safetensors")
"""Names of files, without a folder."""
_BUFFERS = re.compile(r".*(\.rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)")
"""Tensors of old files that are no weights: masks and frequencies, which follow from the config."""


@dataclass(frozen=True)
class Stored:
    """The file, shape and dtype of a tensor."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFiles:
    """The weights in a folder, by name.

    A file is opened anew for each read, because what was read through a mapping stays in a process's memory until the
    mapping ends.

    Args:
        folder: has model.safetensors, or several files and an index of them.
        prefix: what the names of all weights but the head's begin with; files of a model without a head leave it out.

    Raises:
        UserError: a file is missing, cut short, or holds what cannot be read.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        self._not_finite: list[tuple[str, int]] = []
        for path in _files(folder):
            for stored in _contents(path):
                name = stored.key if stored.key.startswith((prefix, "lm_head.")) else prefix + stored.key
                if not _BUFFERS.fullmatch(name):
                    self.tensors[name] = stored
        _check_index(folder, {stored.key for stored in self.tensors.values()})

    def read(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int], index: int | None, transposed: bool
    ) -> Tensor:
        """A box of a tensor, copied.

        Args:
            name: of the tensor.
            rows, columns: from the first to the end, as ours are counted; a tensor of one dim has rows alone.
            index: which tensor of a stack.
            transposed: whether the file has our rows as columns.

        Raises:
            UserError: the file cannot be read.
        """
        stored = self.tensors[name]
        down, across = slice(*rows), slice(*columns)
        with _opened(stored.file) as file:
            whole = file.get_slice(stored.key)
            if index is not None:
                found = whole[index : index + 1, down, across][0]
            elif len(stored.shape) == 1:
                found = whole[down]
            else:
                found = whole[across, down].t() if transposed else whole[down, across]
        if count := _count_not_finite(found):
            self._not_finite.append((name, count))
        return found

    def not_finite(self) -> dict[str, int]:
        """How many values that are not finite each tensor has, as far as it has been read; first those read first.

        The count starts anew.
        """
        counts: dict[str, int] = {}
        while self._not_finite:
            name, count = self._not_finite.pop(0)
            counts[name] = counts.get(name, 0) + count
        return counts


def _count_not_finite(found: Tensor) -> int:
    """How many values are NaN or infinite; looked at in parts, since the check makes several copies of each."""
    rows: Tensor = found.t() if found.dim() == 2 and not found.is_contiguous() else found
    step = max(1, _LOOKED_AT * len(rows) // max(1, rows.numel()))
    return sum(int((~block.isfinite()).sum()) for block in rows.split(step))


class _opened:
    """A file of safetensors, its errors as sentences."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        require_file(self.path)
        try:
            self._file = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError, ValueError, MemoryError) as error:
            raise UserError(f"{self.path} cannot be read ({shortened(str(error))}); fetch it again.") from None
        return self._file.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: there is none.
    """
    if not os.path.lexists(path):
        raise UserError(f"{path} does not exist; give a folder that holds a model of Hugging Face.")
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; fetch it again.")
    return value


def _files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / INDEX):
        names = sorted(set(_weight_map(folder).values()))
        if lost := [name for name in names if not os.path.lexists(folder / name)]:
            raise UserError(f"{folder / INDEX} names {lost[0]}, which is not there; fetch it too.")
        return [folder / name for name in names]
    if os.path.lexists(folder / WHOLE):
        return [folder / WHOLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UserError(
            f"{folder} has its weights as pickles and Threefold reads safetensors alone; "
            f"write them as {WHOLE} with transformers' save_pretrained."
        )
    raise UserError(f"{folder} has neither {WHOLE} nor {INDEX}; give a folder that holds a model of Hugging Face.")


def _weight_map(folder: Path) -> dict[str, str]:
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{folder / INDEX} has no weight_map of tensors to files; fetch it again.")
    for key, name in found.items():
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise UserError(
                f"{folder / INDEX}: weight_map gives {shortened(key)} the file {shortened(repr(name))}, which is no "
                "name of a safetensors file in that folder; fetch it again."
            )
    return found


def _check_index(folder: Path, keys: set[str]) -> None:
    if os.path.lexists(folder / INDEX):
        lost = [key for key in _weight_map(folder) if key not in keys and not _BUFFERS.fullmatch("." + key)]
        if lost:
            raise UserError(
                f"{folder / INDEX} names {lost[0]} and the files it names do not hold it; fetch them again."
            )


def _contents(path: Path) -> Iterable[Stored]:
    with _opened(path) as file:
        for key in file.keys():  # noqa: SIM118
            piece = file.get_slice(key)
            kind = piece.get_dtype()
            if kind not in DTYPES and not _BUFFERS.fullmatch("." + key):
                raise UserError(
                    f"{path} holds {key} as {kind} and Threefold reads {', '.join(DTYPES)}; "
                    "take a copy of the model that is not quantised."
                )
            yield Stored(path, key, tuple(piece.get_shape()), DTYPES.get(kind, torch.float32))
