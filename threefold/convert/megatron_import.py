"""Import of a checkpoint of Megatron-LM: a run with its weights and, if it is there, the state of its optimizer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from threefold.checkpoint.errors import MODEL, OPTIMIZER
from threefold.checkpoint.folder import CONFIG, path_of
from threefold.checkpoint.index import name_of
from threefold.checkpoint.manifest import Facts, write_manifest
from threefold.checkpoint.tensors import save_tensors_alone
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.convert.key_mapping import KeyMapping
from threefold.convert.megatron import fill_training
from threefold.convert.megatron_files import MASTER, STATES, MegatronCheckpoint, open_checkpoint
from threefold.convert.megatron_models import HEAD, read_model, weight_maps
from threefold.errors import UserError
from threefold.files import first_of, shown
from threefold.host import return_freed_memory
from threefold.huggingface.import_hf import LONGEST_SAMPLE, streamed_weights
from threefold.huggingface.mapping import WeightMap
from threefold.models.family import make_model, model_plan
from threefold.output import Progress, check_replaceable, staged_directory, write_durably


@dataclass(frozen=True)
class ImportedMegatron:
    """Summary of an import; `state` says what became of the optimizer's state."""

    checkpoint: Path
    config: Config
    step: int
    parameters: int
    dtypes: tuple[str, ...]
    bytes: int
    state: str


def import_megatron(
    source: Path, out: Path, overwrite: bool, allow_not_finite: bool, progress: Progress
) -> ImportedMegatron:
    """Create a run with a checkpoint of Megatron-LM, after as many steps if it has the state of its optimizer."""
    return_freed_memory()
    check_replaceable(out, [source], overwrite)
    files = open_checkpoint(source)
    where = shown(files.common.path)
    if files.args is None:
        raise UserError(f"{where} has no args, from which the model's settings are read; save it with Megatron-LM.")
    model = {key: value for key, value in read_model(files.args, where).items() if value is not None}
    longest = model["max_position_embeddings"]
    config = _resolved({"model": model, "data": {"path": "tokens", "sequence_length": longest}})
    weights = _checked_weights(files, config, where)
    lacks = _lacking_state(files, weights)
    precision = "bf16" if files.args.get("bf16") is True else "fp16" if files.args.get("fp16") is True else "fp32"
    if lacks:
        template: dict[str, Any] = {
            "model": model,
            "data": {"path": "tokens", "sequence_length": min(longest, LONGEST_SAMPLE)},
            "train": {"init_from": str(out)},
            "precision": {"dtype": precision},
            "optimizer": {"lr": 2e-5},
        }
        step, facts = 0, Facts(0, 0, config.train.seed, None, None, tokens=0, documents=0)
    else:
        template = {"model": model, **_training(files.args, where)}
        config, step = _resolved(template), files.iteration
        batch = config.train.global_batch_size
        consumed = files.args.get("consumed_train_samples")
        consumed = consumed if type(consumed) is int and consumed >= 0 else step * (batch if type(batch) is int else 1)
        facts = Facts(step, consumed, config.train.seed, None, None, tokens=0, documents=0)
    tensors = _tensors(files, weights, config, not lacks, progress)
    total = sum(tensor.nbytes for tensor in tensors.values())
    progress.phase("Importing", total)
    with staged_directory(out, inputs=[source], overwrite=overwrite) as partial:
        folder = path_of(partial, step)
        folder.mkdir(parents=True)
        save_tensors_alone(tensors, folder)
        if files.not_finite and not allow_not_finite:
            first = next(iter(files.not_finite))
            raise UserError(
                f"{shown(files.folder)}: {shown(first)} holds {files.not_finite[first]:,} values that are NaN or "
                "infinite; take an earlier checkpoint, or give --allow-not-finite to import them as they are."
            )
        write_durably(folder / CONFIG, config.to_yaml())
        write_manifest(folder, facts)
        write_durably(partial / CONFIG, yaml.safe_dump(template, sort_keys=False))
    stored = [tensor for name, tensor in tensors.items() if name.startswith(MODEL)]
    dtypes = Counter(name_of(tensor.dtype) for tensor in stored)
    parameters = sum(tensor.numel() for tensor in stored)
    names = tuple(name for name, _ in dtypes.most_common())
    state = f"left out: {lacks}" if lacks else "Adam's moments, after " + f"{files.updates():,.0f} updates"
    return ImportedMegatron(files.folder, config, step, parameters, names, total, state)


def _resolved(sections: Mapping[str, Any]) -> Config:
    return resolve(config_of({name: dict(section) for name, section in sections.items()}), 1)


def _checked_weights(files: MegatronCheckpoint, config: Config, where: str) -> list[WeightMap]:
    if (config.model.num_layers or 0) > len(files.tensors):
        raise UserError(f"{where} says {config.model.num_layers:,} layers and {len(files.tensors)} tensors are there.")
    try:
        with torch.device("meta"):
            model = make_model(config.model)
    except (RuntimeError, OverflowError, TypeError, MemoryError):
        raise UserError(f"{where} describes weights that are too large; fetch it again.") from None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = weight_maps(shapes, files.tensors)
    expected = {name: shape for weight in weights for name, shape in weight.source_shapes().items()}
    held = {name for name in files.tensors if not name.startswith(("optimizer.", "rng_state", "rerun_state"))}
    if missing := expected.keys() - held:
        raise UserError(
            f"{shown(files.folder)} lacks {first_of(sorted(missing), 1, 'tensors')}; copy all of its files."
        )
    unknown = held - expected.keys() - ({HEAD} if config.model.tie_embeddings else set())
    if unknown := {name for name in unknown if not name.endswith(("inv_freq", "_extra_state"))}:
        raise UserError(
            f"{shown(files.folder)} holds {first_of(sorted(unknown), 1, 'tensors')}, which a model with the args in "
            f"{where} does not have here; only GPT and Llama are read."
        )
    for name, shape in expected.items():
        if files.tensors[name].shape != shape:
            found, wanted = (" × ".join(map(str, each)) for each in (files.tensors[name].shape, shape))
            raise UserError(f"{shown(files.folder)}: {name} is {found} and the args in {where} require {wanted}.")
    return weights


def _lacking_state(files: MegatronCheckpoint, weights: list[WeightMap]) -> str:
    """Return why the optimizer's state is not imported, as a clause; empty if it is."""
    name, steps = str((files.args or {}).get("optimizer", "adam")), files.updates()
    names = [source.name for weight in weights for source in weight.sources]
    if files.optimizer_lacks:
        return files.optimizer_lacks
    if name != "adam":
        return f"its optimizer is {shown(name)}, and only that of adam is read"
    if any(f"optimizer.{state}.{each}" not in files.tensors for state in STATES for each in names):
        return "there is none of all weights"
    if not steps or not files.iteration:
        return "it does not say after how many updates it is"
    return ""


def _training(args: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a config with which the run of these arguments goes on."""
    mapping = KeyMapping(Path(where))
    mapping.given = {
        key.replace("_", "-"): value
        for key, value in args.items()
        if isinstance(value, int | float | str) and value is not False
    }
    fill_training(mapping)
    if args.get("decoupled_weight_decay") is False:
        mapping.settings["optimizer.name"] = "adam"
    sections: dict[str, dict[str, Any]] = {"data": {"path": "tokens"}}
    for key, value in mapping.settings.items():
        section, _, name = key.partition(".")
        if section in ("data", "train", "optimizer", "precision"):
            sections.setdefault(section, {})[name] = value
    return sections


def _tensors(
    files: MegatronCheckpoint, weights: list[WeightMap], config: Config, with_state: bool, progress: Progress
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name, which are read as they are saved."""

    def of(prefix: str) -> dict[str, Tensor]:
        named = [
            replace(weight, sources=tuple(replace(each, name=prefix + each.name) for each in weight.sources))
            for weight in weights
        ]
        return streamed_weights(named, model_plan(config.model, 1), files, progress)

    masters = all(f"optimizer.{MASTER}.{each.name}" in files.tensors for weight in weights for each in weight.sources)
    tensors = of(f"optimizer.{MASTER}." if with_state and masters else "")
    if not with_state:
        return tensors
    updates = torch.tensor(files.updates(), dtype=torch.float32)
    for state in STATES:
        for name, tensor in of(f"optimizer.{state}.").items():
            weight = OPTIMIZER + name.removeprefix(MODEL)
            tensors |= {f"{weight}.{state}": tensor, f"{weight}.step": updates.clone()}
    return tensors
