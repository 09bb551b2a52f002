"""`threefold checkpoint import`: make a run of a Hugging Face model, with its weights as the first checkpoint."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import Tensor

from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import CONFIG, PREFIX, TOKENIZER, WITH_TOKENIZER, path_of
from threefold.checkpoint.index import name_of
from threefold.checkpoint.manifest import Facts, write_manifest
from threefold.checkpoint.tensors import ReadableChunk, ReadableTensor, save_tensors_alone
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.data.tokenizer import find_end, loaded
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.files import first_of, load_json
from threefold.host import return_freed_memory
from threefold.huggingface.files import CONFIG as THEIR_CONFIG
from threefold.huggingface.files import (
    SOURCE,
    Box,
    Stored,
    TensorFiles,
    WeightFiles,
    boxes,
    check_tokenizer,
    end_tokens,
    read_box,
    read_model,
    texts_of,
)
from threefold.huggingface.mapping import HuggingFaceType, Repeated, SourceRows, WeightMap
from threefold.huggingface.peft_format import Layer, norms_of_rows
from threefold.huggingface.peft_import import PeftAdapter, require_fitting, whole_tensor
from threefold.huggingface.source import read_json
from threefold.models.family import make_model, model_plan
from threefold.models.sharding import ModelPlan
from threefold.output import Progress, check_replaceable, staged_directory, write_durably

LONGEST_SAMPLE: Final = 2048  # largest data.sequence_length that the config of an imported run proposes, in tokens


@dataclass(frozen=True)
class Import:
    """Request to import the model in the folder `source` as a run at `out`."""

    source: Path
    out: Path
    ignored: tuple[str, ...] = ()  # keys of config.json
    overwrite: bool = False
    allow_not_finite: bool = False
    adapter: Path | None = None  # folder of `peft`
    name: str | None = None  # id on the hub; None for a folder


@dataclass(frozen=True)
class Imported:
    """Summary of an import; `family` is Hugging Face's model_type, and the most common of `dtypes` comes first."""

    family: str
    config: Config
    parameters: int
    dtypes: tuple[str, ...]
    bytes: int
    tokenizer: bool


def import_model(request: Import, progress: Progress) -> Imported:
    """Create a run whose checkpoint of step 0 has the weights of a Hugging Face model, a chunk at a time in memory."""
    return_freed_memory()
    check_replaceable(request.out, [request.source], request.overwrite)
    values = read_json(request.source, THEIR_CONFIG)
    kind, settings = read_model(values, str(request.source / THEIR_CONFIG), request.ignored)
    files = TensorFiles(request.source, kind.prefix)
    settings = kind.settled(settings, files.tensors, request.ignored)
    dtypes = Counter(stored.dtype for stored in files.tensors.values())
    precision = next(name for name, dtype in DTYPES.items() if dtype == dtypes.most_common(1)[0][0])
    longest = settings["max_position_embeddings"]
    # The config to train with, for the run's folder: only what follows from the model. The checkpoint's own has the
    # model's maximum sequence length.
    template = {
        "model": dict(settings),
        "data": {"path": "tokens", "sequence_length": min(longest, LONGEST_SAMPLE)},
        "train": {"init_from": str(request.out)},
        "precision": {"dtype": precision},
        "optimizer": {"lr": 2e-5},
    }
    sections = {name: dict(section) for name, section in template.items() if name != "train"}
    sections["data"]["sequence_length"] = longest
    config = resolve(config_of(sections), 1)
    weights = _checked_weights(kind, config, files, values)
    texts = texts_of(request.source)
    known_as = {SOURCE: request.name or str(request.source.absolute())}
    texts[PREFIX + THEIR_CONFIG] = json.dumps({**load_json(texts[PREFIX + THEIR_CONFIG]), **known_as}, indent=2) + "\n"
    if TOKENIZER in texts:
        check_tokenizer(texts[TOKENIZER], request.source / TOKENIZER, config.model.vocab_size or 0)
    eod = next(iter(end_tokens(request.source)), None)
    if eod is None and TOKENIZER in texts:
        eod = find_end(loaded(texts[TOKENIZER], str(request.source / TOKENIZER), is_tried=True))
    tensors = streamed_weights(weights, model_plan(config.model, 1), files, progress)
    added: dict[str, Tensor] = {}
    if request.adapter is not None:
        shapes = {name.removeprefix(MODEL): tuple(tensor.size()) for name, tensor in tensors.items()}
        peft = PeftAdapter(request.adapter, request.ignored)
        peft.check_base(files.tensors)
        sections["adapter"], added = peft.section_and_weights(
            kind, config, shapes, lambda layer: _norms_of_rows(files.tensors, layer)
        )
        template["adapter"] = sections["adapter"]
        config = resolve(config_of(sections), 1)
        require_fitting(config, added)
        tensors |= {MODEL + name: tensor for name, tensor in added.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    progress.phase("Importing", total)
    with staged_directory(request.out, inputs=[request.source], overwrite=request.overwrite) as partial:
        folder = path_of(partial, 0)
        folder.mkdir(parents=True)
        files.not_finite()  # discard the counts of what the checks above have read
        save_tensors_alone(tensors, folder)
        progress.advance(sum(tensors[MODEL + name].nbytes for name in added))
        counts = {} if request.allow_not_finite else files.not_finite()
        if first := next((name for name in files.tensors if name in counts), None):
            more = sum(counts.values()) - counts[first]
            others = f" and {len(counts) - 1} more tensors {more:,}" if more else ""
            raise UserError(
                f"{files.tensors[first].file}: {first} holds {counts[first]:,} values that are NaN or infinite{others}"
                "; fetch it again, or give --allow-not-finite to import them as they are."
            )
        for name, text in {**texts, CONFIG: config.to_yaml()}.items():
            write_durably(folder / name, text)
        tokenizer = hashlib.sha256(texts[TOKENIZER].encode()).hexdigest() if TOKENIZER in texts else None
        write_manifest(folder, Facts(0, 0, config.train.seed, eod, tokenizer, tokens=0, documents=0))
        write_durably(partial / CONFIG, yaml.safe_dump(template, sort_keys=False))
        for name in (TOKENIZER, *WITH_TOKENIZER):
            if (stored := name if name == TOKENIZER else PREFIX + name) in texts:
                write_durably(partial / name, texts[stored])
    parameters = sum(tensor.numel() for tensor in tensors.values())
    names = tuple(name_of(dtype) for dtype, _ in dtypes.most_common())
    return Imported(kind.name, config, parameters, names, total, TOKENIZER in texts)


def _norms_of_rows(tensors: Mapping[str, Stored], layer: Layer) -> Tensor:
    """Return the norms of the rows of a layer's weight in files of Hugging Face."""
    weight = whole_tensor(tensors[f"{layer.path}.weight"])
    return norms_of_rows(weight.t() if layer.is_transposed else weight)


def _checked_weights(
    kind: HuggingFaceType, config: Config, files: TensorFiles, values: Mapping[str, Any]
) -> list[WeightMap]:
    named = f"{files.folder / THEIR_CONFIG}"
    if (config.model.num_layers or 0) > len(files.tensors):
        raise UserError(
            f"{named} has {config.model.num_layers:,} layers and {files.folder} holds {len(files.tensors)} "
            "tensors; fetch both again."
        )
    try:
        with torch.device("meta"):
            model = make_model(config.model)
    except (RuntimeError, OverflowError, TypeError, MemoryError):
        raise UserError(f"{named} describes weights that are too large; fetch it again.") from None
    held = (*model.named_parameters(), *model.named_buffers())
    shapes = {name: tuple(tensor.shape) for name, tensor in held}
    weights = kind.weights(config.model, shapes, files.tensors)
    expected = {name: shape for weight in weights for name, shape in weight.source_shapes().items()}
    stacks = {source.name for weight in weights for source in weight.sources if source.index is not None}
    if missing := expected.keys() - files.tensors.keys():
        raise UserError(
            f"{files.folder} lacks {first_of(sorted(missing), 1, 'tensors')}, which its {THEIR_CONFIG} requires; "
            "fetch it again."
        )
    unknown = files.tensors.keys() - expected.keys()
    unknown = {name for name in unknown if not kind.leaves_out(name, config.model, values)}
    for tensor, repeated in kind.repeated(config.model).items():
        if tensor in unknown:
            _check_repeated(files, weights, tensor, repeated)
            unknown -= {tensor}
    if unknown:
        raise UserError(
            f"{files.folder} holds {first_of(sorted(unknown), 1, 'tensors')}, which a {kind.name} as in its "
            f"{THEIR_CONFIG} does not have; give the model's own files alone."
        )
    for name, shape in expected.items():
        found = files.tensors[name].shape
        found = found[1:] if name in stacks else found
        if found != shape:
            raise UserError(
                f"{files.tensors[name].file}: {name} is {_shown(found)} and its {THEIR_CONFIG} requires "
                f"{_shown(shape)}; fetch both again."
            )
    return weights


def _check_repeated(files: TensorFiles, weights: list[WeightMap], tensor: str, repeated: Repeated) -> None:
    """Check that a tensor that the files have besides a parameter, such as a tied head, equals it."""
    parameter = next(weight for weight in weights if weight.name == repeated.parameter)
    (source,) = parameter.sources
    other = WeightMap(tensor, parameter.shape, (SourceRows(tensor),))
    if files.tensors[tensor].shape == parameter.shape and all(
        torch.equal(read_box(parameter, files, box), read_box(other, files, box)) for box in boxes(parameter, 4, False)
    ):
        return
    raise UserError(
        f"{files.folder}: {THEIR_CONFIG} says {repeated.because}, and {tensor} is not {source.name}; {repeated.remedy}."
    )


def streamed_weights(
    weights: list[WeightMap], plan: ModelPlan, files: WeightFiles, progress: Progress
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name, in the files' dtypes; they are read chunk by chunk as they are saved."""
    grouped: dict[str, list[WeightMap]] = {}
    for weight in weights:
        grouped.setdefault(weight.name, []).append(weight)
    tensors: dict[str, Tensor] = {}
    for name, slabs in grouped.items():
        sources = [source.name for slab in slabs for source in slab.sources]
        dtype = reduce(torch.promote_types, (files.tensors[source].dtype for source in sources))
        # By columns if tensor parallelism shards the last dim, rather than the first or none.
        rule, last = plan.split_of(name), len(slabs[0].shape) - (slabs[0].expert is None)
        by_columns = rule is not None and last > 0 and rule.cut_dim(name.rpartition(".")[2], "tp") == last
        parts = [(weight, box) for weight in slabs for box in boxes(weight, dtype.itemsize, by_columns)]
        chunks = [_chunk(weight, box, dtype, files, progress) for weight, box in parts]
        stack = () if slabs[0].expert is None else (len(slabs),)
        tensors[MODEL + name] = ReadableTensor((*stack, *slabs[0].shape), dtype, chunks)
    return tensors


def _chunk(weight: WeightMap, box: Box, dtype: torch.dtype, files: WeightFiles, progress: Progress) -> ReadableChunk:
    dims = (box.rows, *((0, size) for size in weight.shape[1:-1]), box.columns)[: len(weight.shape)]
    offsets, sizes = tuple(first for first, _ in dims), tuple(end - first for first, end in dims)

    def read() -> Tensor:
        tensor = read_box(weight, files, box).to(dtype)
        progress.advance(tensor.nbytes)
        return tensor if weight.expert is None else tensor[None]

    if weight.expert is None:
        return ReadableChunk(offsets, sizes, read)
    return ReadableChunk((weight.expert, *offsets), (1, *sizes), read)


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
