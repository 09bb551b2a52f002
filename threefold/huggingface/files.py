"""A Hugging Face folder: its safetensors, slice by slice, the files about its tokenizer, and its config.json."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from threefold.checkpoint.folder import CARRIED, GENERATION, PREFIX, TOKENIZER, carried_by
from threefold.config import ModelConfig
from threefold.data.tokenizer import UNKNOWN, loaded
from threefold.errors import UserError
from threefold.foreign import FolderFiles, write_nofollow
from threefold.huggingface.mapping import ConfigJson, HuggingFaceType, WeightMap, huggingface_types, shortened
from threefold.huggingface.source import CONFIG, read_json

WHOLE: Final = "model.safetensors"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SOURCE: Final = "_name_or_path"
"""Key of a checkpoint's config.json: the folder or id that its model was imported from."""
_FILE = re.compile(r"[\w@+=-][\w@+=., -]{0,240}\.safetensors")
_BUFFERS = re.compile(r".*(\.rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)")
"""Names of tensors in old files that are not weights: masks and frequencies, which follow from the config."""


@dataclass(frozen=True)
class Stored:
    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles(Protocol):
    """Files of weights, from which boxes of tensors can be read."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, each with its `shape` and `dtype`."""

    def read(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int], index: int | None, transposed: bool
    ) -> Tensor:
        """Read a copy of a box of a tensor, as `TensorFiles.read`."""


class TensorFiles:
    """Weights in a folder, by name.

    Each read reopens its file, because pages read through a mapping count as the process's memory until it is unmapped.
    All weight names except the head's begin with `prefix`; files of a model without a head leave it out. UserError if a
    file is missing or truncated, or holds something that cannot be read.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        self._not_finite = Counter[str]()
        paths, index = _files(folder)
        for path in paths:
            for stored in contents(path):
                name = stored.key if stored.key.startswith((prefix, "lm_head.")) else prefix + stored.key
                if not _BUFFERS.fullmatch(name):
                    self.tensors[name] = stored
        keys = {stored.key for stored in self.tensors.values()}
        if lost := [key for key in index if key not in keys and not _BUFFERS.fullmatch("." + key)]:
            raise UserError(
                f"{folder / INDEX} names {lost[0]} and the files it names do not hold it; fetch them again."
            )

    def read(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int], index: int | None, transposed: bool
    ) -> Tensor:
        """Read a copy of a box of a tensor.

        `rows` and `columns` are start and end in our layout; a tensor with one dim has only rows. `index` is that of
        the tensor in a stack. `transposed` says that the file stores our rows as columns.
        """
        stored = self.tensors[name]
        down, across = slice(*rows), slice(*columns)
        with opened(stored.file) as file:
            whole = file.get_slice(stored.key)
            if index is not None:
                found = whole[index : index + 1, down, across][0]
            elif len(stored.shape) == 1:
                found = whole[down]
            elif len(stored.shape) == 3:  # a stack, whose rows are matrices
                found = whole[down, across].mT
            else:
                found = whole[across, down].t() if transposed else whole[down, across]
        # In blocks, since the check makes several copies of its input.
        inner: Tensor = found.t() if found.dim() == 2 and not found.is_contiguous() else found
        step = max(1, (len(inner) << 20) // max(1, inner.numel()))
        if count := sum(int((~block.isfinite()).sum()) for block in inner.split(step)):
            self._not_finite[name] += count
        return found

    def not_finite(self) -> dict[str, int]:
        """Return and reset the number of non-finite values read so far from each tensor, in order of reading."""
        counts, self._not_finite = self._not_finite, Counter()
        return counts


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raise a UserError if it cannot be read."""
    try:
        opened = safe_open(FolderFiles(path.parent).path(path.name), framework="pt")
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        reason = shortened(getattr(error, "strerror", None) or str(error))
        raise UserError(f"{path} cannot be read ({reason}); fetch it again.") from None
    with opened as file:
        yield file


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the safetensors files of a folder, and the file of each tensor according to the index, if it has one."""
    files = FolderFiles(folder)
    if files.holds(INDEX):
        found = read_json(folder, INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise UserError(f"{folder / INDEX} has no weight_map of tensors to files; fetch it again.")
        for key, name in found.items():
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise UserError(
                    f"{folder / INDEX}: weight_map gives {shortened(key)} the file {shortened(repr(name))}, which is "
                    "not a name of a safetensors file in that folder; fetch it again."
                )
        names = sorted(set(found.values()))
        if lost := [name for name in names if not files.holds(name)]:
            raise UserError(f"{folder / INDEX} names {lost[0]}, which is not there; fetch it too.")
        return [folder / name for name in names], found
    if files.holds(WHOLE):
        return [folder / WHOLE], {}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UserError(
            f"{folder} has its weights as pickles and Threefold reads safetensors alone; "
            f"write them as {WHOLE} with transformers' save_pretrained."
        )
    raise UserError(f"{folder} has neither {WHOLE} nor {INDEX}; give a folder that holds a model of Hugging Face.")


def contents(path: Path) -> Iterable[Stored]:
    """Yield the tensors of a safetensors file; raise a UserError for one that is quantised or cannot be read."""
    with opened(path) as file:
        for key in file.keys():  # noqa: SIM118
            found = file.get_slice(key)
            kind = found.get_dtype()
            if kind not in DTYPES and not _BUFFERS.fullmatch("." + key):
                raise UserError(
                    f"{path} holds {key} as {kind} and Threefold reads {', '.join(DTYPES)}; "
                    "take a copy of the model that is not quantised."
                )
            yield Stored(path, key, tuple(found.get_shape()), DTYPES.get(kind, torch.float32))


def texts_of(source: Path) -> dict[str, str]:
    """Read the tokenizer and sidecar files of the model in `source`, keyed by their names in a checkpoint."""
    files, kept = FolderFiles(source), {TOKENIZER: TOKENIZER, **{PREFIX + name: name for name in CARRIED}}
    texts = {ours: files.text(name) for ours, name in kept.items() if files.holds(name)}
    for name in (name for ours, name in kept.items() if ours in texts and name.endswith(".json")):
        read_json(source, name)
    if TOKENIZER in texts:
        _tokenizer(texts[TOKENIZER], source / TOKENIZER)
    return texts


def _tokenizer(text: str, path: Path, is_tried: bool = False) -> Tokenizer:
    return loaded(text, str(path), "; fetch it again.", is_tried)


def check_tokenizer(text: str, path: Path, rows: int) -> None:
    """Check that each token of a tokenizer.json from `texts_of` has one of the embedding's rows; UserError if not."""
    ids = _tokenizer(text, path, is_tried=True).get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    if largest >= rows:
        raise UserError(
            f"{path} has {len(ids):,} tokens with ids up to {largest:,} and the embedding has {rows:,} rows "
            f"(vocab_size in {CONFIG}); give the tokenizer that belongs to the model, with ids up to {rows - 1:,}."
        )


def end_tokens(folder: Path, prefix: str = "") -> list[int]:
    """Return the distinct tokens that end a text by config.json and generation_config.json, named with `prefix`."""
    found: list[Any] = []
    files = FolderFiles(folder)
    for name in (f"{prefix}{name}" for name in (CONFIG, GENERATION)):
        named = read_json(folder, name).get("eos_token_id") if files.holds(name) else None
        named = named if isinstance(named, list) else [named]
        if not all(each is None or (type(each) is int and 0 <= each < 1 << 31) for each in named):
            shown = shortened(repr(named[0] if len(named) == 1 else named))
            raise UserError(
                f"{folder / name}: eos_token_id is {shown} but must be a token's id or a list of them; fetch it again."
            )
        found += named
    return list(dict.fromkeys(token for token in found if token is not None))


def write_texts(checkpoint: Path, folder: Path, eod: int | None) -> list[str]:
    """Write a checkpoint's tokenizer and sidecar files, except config.json, to a folder, and return their names.

    A tokenizer that was not imported gets a tokenizer_config.json: without one, `transformers` would read it as one of
    the model's family. `eod` is the token that ends a document.
    """
    texts = {name.removeprefix(PREFIX): text for name, text in carried_by(checkpoint).items()}
    is_imported = texts.pop(CONFIG, None) is not None
    if TOKENIZER in texts and TOKENIZER_CONFIG not in texts and not is_imported:
        texts[TOKENIZER_CONFIG] = _tokenizer_config(_tokenizer(texts[TOKENIZER], checkpoint / TOKENIZER), eod)
    for name, text in texts.items():
        write_nofollow(folder / name, text)
    return sorted(texts)


def _tokenizer_config(tokenizer: Tokenizer, eod: int | None) -> str:
    tokens = {
        "eos_token": None if eod is None else tokenizer.id_to_token(eod),
        "unk_token": UNKNOWN if tokenizer.token_to_id(UNKNOWN) is not None else None,
    }
    named = {name: token for name, token in tokens.items() if token is not None}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    return json.dumps(values, indent=2) + "\n"


def imported_config(checkpoint: Path) -> dict[str, Any]:
    """Return the config.json that a checkpoint's model was imported with; empty if it was not imported."""
    name = PREFIX + CONFIG
    return read_json(checkpoint, name) if FolderFiles(checkpoint).holds(name) else {}


BOX_BYTES: Final = 16 << 20  # maximum bytes that are read at once and stored as one chunk
SMALL: Final = 1 << 18  # bytes up to which a tensor is stored as one chunk
BOXES: Final = 8
"""Minimum number of chunks of a larger tensor, so that each of as many ranks can read only its own shard."""


@dataclass(frozen=True)
class Box:
    """Start and end of the rows and columns of a part of a tensor; a tensor with one dim has a single column."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def boxes(weight: WeightMap, itemsize: int, by_columns: bool) -> Iterator[Box]:
    """Divide a parameter into boxes of at most `BOX_BYTES`, and into at least `BOXES` of them unless it is small.

    If `by_columns`, the last of two dims is cut instead of the first, which is cut only between groups.
    """
    size = prod(weight.shape) * itemsize
    rows, columns = weight.shape[0], weight.shape[-1] if len(weight.shape) > 1 else 1
    unit, length = (1, columns) if by_columns else (weight.group, rows)
    limit = BOX_BYTES if size <= SMALL else min(BOX_BYTES, -(-size // BOXES))
    step = max(1, limit * length // (size * unit)) * unit
    for first in range(0, length, step):
        span = (first, min(first + step, length))
        yield Box((0, rows), span) if by_columns else Box(span, (0, columns))


def read_box(weight: WeightMap, files: WeightFiles, box: Box) -> Tensor:
    """Read a box of a parameter. Raises UserError if the files cannot be read."""
    groups = range(box.rows[0] // weight.group, box.rows[1] // weight.group)
    read = []
    for source in weight.sources:
        rows = (source.start + groups.start * source.rows, source.start + groups.stop * source.rows)
        read.append(files.read(source.name, rows, box.columns, source.index, weight.transposed))
    if len(read) == 1 and not weight.order:
        return read[0].contiguous()
    parts = zip(weight.sources, read, strict=True)
    joined = torch.cat([part.unflatten(0, (len(groups), source.rows)) for source, part in parts], dim=1)
    return (joined[:, list(weight.order)] if weight.order else joined).flatten(0, 1)


def split(weight: WeightMap, parameter: Tensor) -> dict[str, Tensor]:
    """Split a whole parameter into the tensors of the files, by name."""
    matrix = parameter if weight.expert is None else parameter[weight.expert]
    joined = matrix.unflatten(0, (-1, weight.group))
    if weight.order:
        joined = torch.empty_like(joined).index_copy_(1, torch.tensor(weight.order), joined)
    groups = joined.split([source.rows for source in weight.sources], dim=1)
    rows: dict[str, list[Tensor]] = {}
    for source, part in zip(weight.sources, groups, strict=True):
        rows.setdefault(source.name, []).append(part.flatten(0, 1))
    whole = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in rows.items()}
    return {name: tensor.mT for name, tensor in whole.items()} if weight.transposed else whole


def read_model(
    values: Mapping[str, Any], where: str, ignored: Collection[str] = ()
) -> tuple[HuggingFaceType, dict[str, Any]]:
    """Return the model type that a config.json names, and the `model` settings it describes."""
    name, types = values.get("model_type"), huggingface_types()
    if not isinstance(name, str) or name not in types:
        raise UserError(
            f"{where}: model_type is {shortened(repr(name))} and Threefold reads {', '.join(types)}; "
            "give a model of one of these families."
        )
    kind = types[name]
    given = ConfigJson(values, kind.defaults, where)
    given.take("model_type")
    if given.take("quantization_config"):
        raise given.problem("quantization_config means that the weights are quantised", "take a copy that is not")
    settings = kind.read(given)
    given.finish(ignored)
    return kind, {"architecture": kind.architecture, **settings}


def choose_type(model: ModelConfig, preferred: str | None) -> HuggingFaceType:
    """Choose the type to export as: the `preferred` one if it fits, else the first that does; UserError if none."""
    types = huggingface_types()
    alike = [kind for kind in types.values() if kind.architecture == model.architecture]
    ordered = sorted(alike, key=lambda kind: kind.name != preferred)
    for kind in ordered:
        if kind.obstacle(model) is None:
            longest = model.max_position_embeddings
            if model.rope_scaling == "dynamic" and model.rope_original_positions != longest:
                raise UserError(
                    f"model.rope_original_positions is {model.rope_original_positions}, and for rope_scaling dynamic a "
                    f"config.json can only say {longest}, its max_position_embeddings; use linear, llama3 or yarn."
                )
            return kind
    settings = sorted({obstacle for kind in ordered if kind.is_near(model) and (obstacle := kind.obstacle(model))})
    against = f"each lacks one of {'; '.join(settings)}" if settings else f"none is of {model.architecture}"
    raise UserError(
        f"No family of Hugging Face that Threefold writes ({', '.join(types)}) has a place for this model: {against}."
    )


def write_model(
    model: ModelConfig, kind: HuggingFaceType, dtype: str, eod: int | None, imported: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a model; `imported` is the one it was imported with, if it was."""
    tokens = {key: imported.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if tokens["eos_token_id"] is None:
        tokens["eos_token_id"] = eod
    head = {"architectures": [kind.head], "model_type": kind.name}
    return {**head, **kind.write(model), **tokens, "dtype": dtype, "torch_dtype": dtype, "use_cache": True}


def left_out(model: ModelConfig, kind: HuggingFaceType) -> tuple[str, ...]:
    """Return the training settings, with their values, for which a config.json of the type has no key."""
    names = [name for name in kind.training_only() if name not in dict(model.unused())]
    return tuple(f"model.{name} {getattr(model, name):g}" for name in names if getattr(model, name))
