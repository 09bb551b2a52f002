"""Adapters (LoRA) of the package `peft`, as the adapters of a run: its section `adapter`, and their weights."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.adapters.attach import projections
from threefold.adapters.merging import factors_of
from threefold.config import Config
from threefold.errors import UserError
from threefold.foreign import FolderFiles
from threefold.huggingface.files import Stored, contents, opened
from threefold.huggingface.mapping import ConfigJson, HuggingFaceType, Shapes, shortened
from threefold.huggingface.peft_format import CONFIG, MAGNITUDES, STEM, Layer, layers_of
from threefold.huggingface.source import read_json
from threefold.models.family import model_plan
from threefold.models.sharding import LORA_A, LORA_B, MAGNITUDE, TABLE_A, TABLE_B, Column

_HARMLESS: Final = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        # The tensors in the file say which layers have an adapter.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    )
)
_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|(lora_magnitude_vector)(?:\.weight)?)"
)
_COPY: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")


class PeftAdapter:
    """Adapters in a folder of `peft`, for a model of Hugging Face; UserError for anything that has no place in a run.

    Attributes:
        section: the settings of `adapter`, without `targets`.
    """

    def __init__(self, folder: Path, ignored: Collection[str] = ()) -> None:
        self._folder, self._file = folder, folder / f"{STEM}.safetensors"
        if not FolderFiles(folder).holds(CONFIG):
            raise UserError(f"--adapter is {folder}, which has no {CONFIG}; give the folder of an adapter of peft.")
        given = ConfigJson(read_json(folder, CONFIG), {}, str(folder / CONFIG))
        given.require("peft_type", "LORA")
        given.require("bias", "none")
        given.require("init_lora_weights", True, False, "gaussian", "eva")  # the others change the base too
        self._rank = given.whole("r", least=1, most=1 << 16)
        self._alpha, stabilized = float(given.number("lora_alpha", self._rank)), given.flag("use_rslora")
        self._ranks, self._alphas = (self._pattern(given, key) for key in ("rank_pattern", "alpha_pattern"))
        self.section: dict[str, Any] = {"rank": self._rank, "alpha": self._alpha}
        if dropout := float(given.number("lora_dropout", 0.0)):
            self.section["dropout"] = dropout
        if stabilized:
            self.section["rank_stabilized"] = True
        if given.flag("use_dora"):
            self.section["dora"] = True
        given.finish({*_HARMLESS, *ignored})
        self._given = given
        self._copies: dict[str, Stored] = {}  # weights of the base that `peft` stores beside adapters of an embedding
        self._tensors = self._read()

    def _pattern(self, given: ConfigJson, key: str) -> dict[str, float]:
        value = given.take(key) or {}
        if not isinstance(value, dict) or not all(re.fullmatch(r"[\w.]+", name) for name in value):
            raise given.refuse(key, value, "names of layers in it alone")
        return {name: given.checked_number(f"{key} of {name}", each) for name, each in value.items()}

    def _read(self) -> dict[str, dict[str, Stored]]:
        """Return the factors `A` and `B` of each layer of transformers, `EA` and `EB` of an embedding, magnitudes."""
        found: dict[str, dict[str, Stored]] = {}
        for stored in contents(self._file):
            if match := _COPY.fullmatch(stored.key):
                self._copies[f"{match[1]}.weight"] = stored
                continue
            match = _KEY.fullmatch(stored.key)
            if match is None or len(stored.shape) != (1 if match[4] else 2):
                raise UserError(
                    f"{self._file} holds {shortened(stored.key)}, which is no factor of a layer's adapter; give LoRA "
                    "adapters alone, without modules that are trained whole."
                )
            path, factor, of_table, magnitude = match.groups()
            found.setdefault(path, {})[factor or magnitude or f"E{of_table}"] = stored
        return found

    def check_base(self, base: Mapping[str, Stored]) -> None:
        """Raise a `UserError` if the base's weights that the adapter's file has too are others."""
        for name, stored in self._copies.items():
            if name not in base or not torch.equal(whole_tensor(base[name]), whole_tensor(stored)):
                raise UserError(
                    f"{self._file} has a {shortened(name)} of its own, which is not that of the model; give the model "
                    "that it was trained with."
                )

    def section_and_weights(
        self, kind: HuggingFaceType, config: Config, shapes: Shapes, norms: Callable[[Layer], Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the section `adapter` of a run of the model, and the adapters' weights by their names there.

        `config` is that of the model without adapters, `shapes` are those of its weights, `norms` returns those of the
        rows of a layer.
        """
        by_weight: dict[str, list[Layer]] = {}
        known = set[str]()
        for layer in layers_of(kind, config, shapes):
            known.add(layer.path)
            if layer.path in self._tensors:
                by_weight.setdefault(layer.weight, []).append(layer)
        if unknown := self._tensors.keys() - known:
            raise UserError(
                f"{self._file} has an adapter of {shortened(min(unknown))}, which is no linear layer of this "
                f"{kind.name}; give the model that it was trained with."
            )
        if not by_weight:
            raise UserError(f"{self._file} holds no adapters; give the folder of an adapter.")
        weights: dict[str, Tensor] = {}
        targets: list[str] = []
        plan = model_plan(config.model, 1)
        for name, layers in by_weight.items():
            module, rule = name.removesuffix(".weight"), plan.split_of(name)
            every = list(projections(rule.unit)) if isinstance(rule, Column) else []
            chosen = [part for part in every or [""] if any(part in layer.parts for layer in layers)]
            whole = len(chosen) == max(1, len(every))
            targets += [module] if whole else [f"{module}.{part}" for part in chosen]
            a, b = self._joined(layers, chosen, shapes[name])
            is_table = "EA" in self._tensors[layers[0].path]
            weights[f"{module}.{TABLE_A if is_table else LORA_A}"] = a
            weights[f"{module}.{TABLE_B if is_table else LORA_B}"] = b
            if self.section.get("dora"):
                weights[f"{module}.{MAGNITUDE}"] = self._magnitudes(layers, shapes[name][0], norms)
        section = {**self.section, "targets": _together(targets, config.model.num_layers or 0, shapes)}
        return section, weights

    def _joined(self, layers: Sequence[Layer], chosen: Sequence[str], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return our factors of a weight of this shape from those of its layers in transformers."""
        parts: dict[str, Tensor] = {}
        (outputs, inputs), rank = shape, self._rank
        both = torch.zeros(0)
        for layer in layers:
            a, b = self._factors(layer.path, len(layer.rows), inputs)
            both = both if both.numel() else b.new_zeros(outputs, rank)
            if layer.path in self._tensors and "EA" in self._tensors[layer.path]:
                return a, b
            count = len(layer.parts)
            if len(a) not in (rank, rank * count):
                raise self._given.problem(
                    f"{layer.path} has the rank {len(a)}, and others {rank}", "use adapters of one rank"
                )
            for number, part in enumerate(layer.parts):
                own = slice(number * rank, (number + 1) * rank) if len(a) > rank else slice(rank)
                mine = torch.tensor([name == part for name in layer.names])
                parts[part] = a[own]
                both[layer.rows[mine]] = b[mine][:, own]
                if len(a) > rank and b[mine].count_nonzero() > b[mine][:, own].count_nonzero():
                    raise self._given.problem(
                        f"{layer.path} has the rank {len(a)}, and others {rank}", "use adapters of one rank"
                    )
        return torch.cat([parts[part] for part in chosen]), both

    def _magnitudes(self, layers: Sequence[Layer], outputs: int, norms: Callable[[Layer], Tensor]) -> Tensor:
        """Return the changes of the magnitudes of a weight's rows, from the magnitudes of its layers."""
        changes = torch.zeros(0)
        for layer in layers:
            magnitudes = whole_tensor(self._tensors[layer.path][MAGNITUDES])
            if magnitudes.shape != (len(layer.rows),) or not bool(magnitudes.isfinite().all()):
                raise UserError(
                    f"{self._file}: the magnitudes of {shortened(layer.path)} are not {len(layer.rows):,} finite "
                    "numbers; fetch it again."
                )
            changes = changes if changes.numel() else magnitudes.new_zeros(outputs)
            changes[layer.rows] = magnitudes - norms(layer).to(magnitudes.dtype)
        return changes

    def _factors(self, path: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """Return A and B of a layer of transformers in fp32 at least, B with its factor in units of the section's."""
        stored = self._tensors[path]
        prefix = "E" if "EA" in stored else ""
        wanted = {f"{prefix}A", f"{prefix}B", *([MAGNITUDES] if self.section.get("dora") else [])}
        if prefix and MAGNITUDES in stored:
            raise UserError(
                f"{self._file} has magnitudes (DoRA) of {shortened(path)}, and embeddings have none in Threefold; "
                "merge the adapter into the model with peft."
            )
        if stored.keys() != wanted:
            raise UserError(f"{self._file} lacks a factor of the adapter of {shortened(path)}; fetch it again.")
        a, b = (whole_tensor(stored[prefix + each]) for each in "AB")
        if prefix:
            outputs, inputs = inputs, outputs
        if a.shape != (len(a), inputs) or b.shape != (outputs, len(a)):
            raise UserError(
                f"{self._file}: the adapter of {shortened(path)} has the shapes {[*a.shape]} and {[*b.shape]}, and the "
                f"layer is {outputs} × {inputs}; give the model that it was trained with."
            )
        if len(a) != (said := _of(self._ranks, path, self._rank)):
            raise self._given.problem(f"the rank of {path} is {said:g}, and its tensors have {len(a)}")
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            raise UserError(f"{self._file}: the adapter of {shortened(path)} has values that are NaN or infinite.")
        alpha = _of(self._alphas, path, self._alpha)
        divided = sqrt if self.section.get("rank_stabilized") else float
        return a, b * (alpha / divided(len(a)) / (self._alpha / divided(self._rank)))


def _of(pattern: Mapping[str, float], path: str, default: float) -> float:
    """Return the value of the first name in a pattern that a layer's path is, or ends with."""
    return next((value for name, value in pattern.items() if f".{path}".endswith(f".{name}")), default)


def whole_tensor(stored: Stored) -> Tensor:
    """Return a tensor of a file, in fp32 at least."""
    with opened(stored.file) as file:
        read: Tensor = file.get_tensor(stored.key)
        return read.to(torch.promote_types(read.dtype, torch.float32))


def _together(targets: Sequence[str], layers: int, shapes: Shapes) -> list[str]:
    """Return patterns of these names, one for a name that all blocks have."""
    blocks: dict[str, list[str]] = {}
    found: list[str] = []
    for target in targets:
        first, _, rest = target.partition(".")
        if first != "blocks":
            found.append(target)
            continue
        number, _, inside = rest.partition(".")
        blocks.setdefault(inside, []).append(number)
    for inside, numbers in blocks.items():
        having = {
            name.split(".")[1]
            for name in shapes
            if name.startswith("blocks.") and name.split(".", 2)[2].startswith(inside.rsplit(".", 1)[0])
        }
        everywhere = len(numbers) == layers or set(numbers) == having
        found += [f"blocks.*.{inside}"] if everywhere else [f"blocks.{number}.{inside}" for number in numbers]
    return found


def require_fitting(config: Config, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless the weights are those of the adapters that a run's config describes."""
    names = Counter(name for factors in factors_of(config).values() for name in factors.names)
    if names.keys() != weights.keys():
        raise ValueError(f"the adapters have {sorted(weights)} and the config {sorted(names)}")
