"""Checkpoints of Megatron-LM, `torch_dist` or `mp_rank_*`, as tensors of the whole model by name.

Names have the number of the layer in the model. `optimizer.STATE.NAME` is the state of Adam for the tensor NAME, where
STATE is `exp_avg`, `exp_avg_sq` or, for weights that the model has in fewer bits, `fp32_param`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.convert.megatron_models import LATEST, joined_dim
from threefold.convert.pickled import Call
from threefold.convert.torch_files import METADATA, DistributedFolder, PickledTensor, TorchFile
from threefold.errors import UserError
from threefold.files import first_of, shown
from threefold.foreign import FolderFiles

COMMON: Final = "common.pt"
RANK_FILE: Final = "model_optim_rng.pt"
_RANK: Final = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")
_ITERATION: Final = re.compile(r"iter_\d{7,9}|release")
STATES: Final = ("exp_avg", "exp_avg_sq")
MASTER: Final = "fp32_param"
LAYERS: Final = "decoder.layers."


@dataclass(frozen=True)
class Whole:
    """Shape and dtype of a tensor of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def checkpoint_in(folder: Path) -> Path:
    """Return the folder of the newest checkpoint in `folder`, or `folder` if it is one; raise UserError if none is."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if METADATA in names or any(map(_RANK.fullmatch, names)):
        return folder
    found = sorted(name for name in names if _ITERATION.fullmatch(name))
    if LATEST in names:
        text = FolderFiles(folder).text(LATEST).strip()
        latest = text if text == "release" else f"iter_{text.zfill(7)}"
        if latest not in found:
            raise UserError(
                f"{shown(folder / LATEST)} names {shown(latest)}, which is not there; copy it too, or give the folder "
                "of another checkpoint."
            )
        return checkpoint_in(folder / latest)
    if len(found) == 1:
        return checkpoint_in(folder / found[0])
    what = f"holds {first_of(found)} and no {LATEST}" if found else "holds no checkpoint of Megatron-LM"
    raise UserError(f"{shown(folder)} {what}; give a folder such as iter_0001000.")


class MegatronCheckpoint(ABC):
    """A checkpoint: the arguments of its run, and tensors by name; `optimizer_lacks` says why there are no states."""

    tensors: Mapping[str, Whole]
    optimizer_lacks: str = ""

    def __init__(self, folder: Path, common: TorchFile) -> None:
        self.folder, self.common = folder, common
        self._last: tuple[str, Tensor] | None = None
        self.not_finite: dict[str, int] = {}
        """Numbers of values that are not finite in the tensors read so far, by name."""
        if not isinstance(common.value, dict):
            raise common.problem("it is no checkpoint of Megatron-LM")
        args = common.value.get("args")
        self.args: Mapping[str, Any] | None = args.attributes if isinstance(args, Call) else None

    @property
    def iteration(self) -> int:
        found = self.common.value.get("iteration", 0)
        return found if type(found) is int and 0 <= found < 1 << 31 else 0

    @abstractmethod
    def whole(self, name: str) -> Tensor:
        """Read a whole tensor."""

    @abstractmethod
    def updates(self) -> float | None:
        """Return the number of updates that the state of Adam counts; None if there is none."""

    def read(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int], index: int | None, transposed: bool
    ) -> Tensor:
        """Read a box of a tensor, as `TensorFiles.read` does of those of Hugging Face."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self.whole(name))
            if count := int((~self._last[1].isfinite()).sum()):
                self.not_finite[name] = count
        tensor = self._last[1]
        return tensor[slice(*rows)] if tensor.dim() == 1 else tensor[slice(*rows), slice(*columns)]

    def scalar(self, value: Any) -> float | None:
        """Return a number that may be stored as a tensor."""
        tensor = self.common.tensor(value)
        if tensor is not None:
            return float(self.common.read(tensor)) if prod(tensor.shape) == 1 else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def open_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Open the newest checkpoint in a folder."""
    place = checkpoint_in(folder)
    names = {path.name for path in place.iterdir()}
    if METADATA not in names:
        return RankFiles(place)
    if COMMON not in names:
        raise UserError(
            f"{shown(place)} has {METADATA} and no {COMMON}, so it is no torch_dist checkpoint of Megatron-LM; give "
            "one that is."
        )
    return TorchDist(place)


class TorchDist(MegatronCheckpoint):
    """A checkpoint of the format `torch_dist`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TorchFile(folder, COMMON))
        self._files = DistributedFolder(folder)
        self._sources: dict[str, tuple[str, int | None]] = {}
        for stored, tensor in self._files.tensors.items():
            plain = re.sub(r"^(model\d*\.|module\.)+", "", stored)
            state = re.fullmatch(rf"(?:chained_0\.)?optimizer\.state\.({'|'.join((*STATES, MASTER))})\.(.+)", plain)
            prefix, name = (f"optimizer.{state[1]}.", state[2]) if state else ("", plain)
            if not state and stored.startswith(("optimizer.", "chained_")):
                self.optimizer_lacks = "its state of the optimizer is in the order of Megatron-LM's buffers"
                continue
            rest = name.removeprefix(LAYERS)
            if rest == name or rest.partition(".")[0].isdecimal():
                self._sources[prefix + name] = (stored, None)
            else:  # all layers in one tensor
                for layer in range(tensor.shape[0] if tensor.shape else 0):
                    self._sources[f"{prefix}{LAYERS}{layer}.{rest}"] = (stored, layer)
        self.tensors = {
            name: Whole(self._files.tensors[stored].shape[layer is not None :], self._files.tensors[stored].dtype)
            for name, (stored, layer) in self._sources.items()
        }

    def whole(self, name: str) -> Tensor:
        stored, layer = self._sources[name]
        return self._files.read(stored) if layer is None else self._files.read(stored, layer)

    def updates(self) -> float | None:
        optimizer = self.common.value.get("optimizer")
        optimizer = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
        state, groups = optimizer.get("state"), optimizer.get("param_groups")
        found = [state["common_step"]] if isinstance(state, dict) and "common_step" in state else []
        if isinstance(groups, list):
            found += [group["step"] for group in groups if isinstance(group, dict) and "step" in group]
        return next((count for value in found if (count := self.scalar(value)) is not None), None)


class RankFiles(MegatronCheckpoint):
    """A checkpoint with a folder `mp_rank_TP` or `mp_rank_TP_PP` for each rank of a replica."""

    def __init__(self, folder: Path) -> None:
        self._ranks: dict[tuple[int, int], TorchFile] = {}  # by pipeline and tensor-parallel rank, in the order of both
        for path in sorted(folder.iterdir()):
            if match := _RANK.fullmatch(path.name):
                self._ranks[int(match[2] or 0), int(match[1])] = TorchFile(path, RANK_FILE)
            elif path.name.startswith("mp_rank_"):
                raise UserError(f"{shown(path)} is of a model with experts on several ranks, which is not read yet.")
        stages, self.tp = (1 + max(rank[dim] for rank in self._ranks) for dim in range(2))
        wanted = [(stage, rank) for stage in range(stages) for rank in range(self.tp)]
        if lost := [each for each in wanted if each not in self._ranks]:
            name = f"mp_rank_{lost[0][1]:02d}" + (f"_{lost[0][0]:03d}" if stages > 1 else "")
            raise UserError(f"{shown(folder)} lacks {name}; copy the folders of all ranks.")
        super().__init__(folder, self._ranks[0, 0])
        self._sources: dict[str, list[tuple[TorchFile, PickledTensor]]] = {}
        self._steps: list[float] = []
        self._firsts = self._first_layers([self._models(self._ranks[stage, 0]) for stage in range(stages)])
        for (stage, part), first in self._firsts.items():
            for rank in range(self.tp):
                file = self._ranks[stage, rank]
                if (tensors := self._models(file).get(part)) is None:
                    raise file.problem("it holds another part of the model than the files beside it")
                self._add(file, {_numbered(name, first): tensor for name, tensor in tensors.items()})
        self._add_optimizers()
        self.tensors = {name: self._joined(name, parts) for name, parts in self._sources.items()}

    def _models(self, file: TorchFile) -> dict[str, dict[str, PickledTensor]]:
        """Return the tensors of each part of a rank's model, by name."""
        value = file.value if isinstance(file.value, dict) else {}
        names = ["model"] if "model" in value else [f"model{n}" for n in range(64) if f"model{n}" in value]
        found = {}
        for name in names:
            tensors = value[name] if isinstance(value[name], dict) else {}
            known = {re.sub(r"^(module\.)+", "", str(key)): file.tensor(each) for key, each in tensors.items()}
            found[name] = {key: tensor for key, tensor in known.items() if tensor and not key.endswith("_extra_state")}
        if not any(found.values()):
            raise file.problem("it holds no model")
        if any("language_model." in key for each in found.values() for key in each):
            raise UserError(
                f"{shown(file.path)} is of one of Megatron-LM's legacy models; save it with --use-mcore-models, after "
                "its tools/checkpoint/convert.py."
            )
        return found

    def _first_layers(self, models: Sequence[Mapping[str, Mapping[str, PickledTensor]]]) -> dict[tuple[int, str], int]:
        """Return how many layers come before those of each part of each stage; parts go round the stages in turn."""
        found: dict[tuple[int, str], int] = {}
        first = 0
        for chunk in range(max(map(len, models))):
            for stage, of_stage in enumerate(models):
                if len(of_stage) > chunk:
                    part = list(of_stage)[chunk]
                    found[stage, part] = first
                    first += len({name.split(".")[2] for name in of_stage[part] if name.startswith(LAYERS)})
        return found

    def _add(self, file: TorchFile, tensors: Mapping[str, PickledTensor]) -> None:
        for name, tensor in tensors.items():
            self._sources.setdefault(name, []).append((file, tensor))

    def _add_optimizers(self) -> None:
        """Add the state of Adam of each rank, whose weights are counted by group, in the order of the model."""
        found: list[tuple[TorchFile, dict[str, PickledTensor]]] = []
        for (stage, _), file in self._ranks.items():
            named = {
                _numbered(name, self._firsts[stage, part]): tensor
                for part, tensors in self._models(file).items()
                for name, tensor in tensors.items()
            }
            try:
                states = self._states(file, named)
            except (AttributeError, IndexError, TypeError):
                raise file.problem("its state of the optimizer is damaged") from None
            if states is None:
                self.optimizer_lacks = self.optimizer_lacks or "its files hold no state of Adam by weight"
                return
            found.append((file, states))
        for file, states in found:
            self._add(file, states)

    def _states(self, file: TorchFile, weights: Mapping[str, PickledTensor]) -> dict[str, PickledTensor] | None:
        optimizer = file.value.get("optimizer")
        if not isinstance(optimizer, dict):
            return None
        masters, optimizer = optimizer.get("fp32_from_fp16_params"), optimizer.get("optimizer", optimizer)
        optimizer = optimizer if isinstance(optimizer, dict) else {}
        state, groups = optimizer.get("state"), optimizer.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list) or not state:
            return None
        found: dict[str, PickledTensor] = {}
        by_decay: dict[bool, list[str]] = {False: [], True: []}
        for name, weight in weights.items():
            by_decay[_decays(name, weight)].append(name)
        for place, group in enumerate(groups):
            names = by_decay.pop(bool(group.get("wd_mult")), None)
            numbers = group.get("params")
            if names is None or not isinstance(numbers, list) or len(numbers) != len(names):
                return None  # other groups than those with and without decay
            for at, (number, name) in enumerate(zip(numbers, names, strict=True)):
                values = state.get(number)
                if not isinstance(values, dict):
                    return None
                tensors = {each: file.tensor(values.get(each)) for each in STATES}
                if masters is not None:
                    tensors[MASTER] = file.tensor(masters[place][at])
                if any(tensor is None or tensor.shape != weights[name].shape for tensor in tensors.values()):
                    raise file.problem(f"the optimizer's state of {shown(name)} does not fit it")
                found |= {f"optimizer.{each}.{name}": tensor for each, tensor in tensors.items() if tensor}
                step = values.get("step", group.get("step"))
                tensor = file.tensor(step)
                count = float(file.read(tensor)) if tensor is not None else step
                if isinstance(count, int | float):
                    self._steps.append(count)
        return found

    def _joined(self, name: str, parts: Sequence[tuple[TorchFile, PickledTensor]]) -> Whole:
        (file, first), dim = parts[0], self._dim(name)
        if len(parts) not in (self.tp, 2 * self.tp):  # a tied table is on the first and on the last stage
            raise file.problem(f"{shown(name)} is not on all ranks")
        shape = list(first.shape)
        if any(tensor.shape != first.shape or tensor.dtype != first.dtype for _, tensor in parts):
            raise file.problem(f"{shown(name)} has other sizes on other ranks")
        if dim is not None and dim < len(shape):
            shape[dim] *= self.tp
        return Whole(tuple(shape), first.dtype)

    def _dim(self, name: str) -> int | None:
        return joined_dim(name) if self.tp > 1 else None

    def whole(self, name: str) -> Tensor:
        parts, dim = [file.read(tensor) for file, tensor in self._sources[name][: self.tp]], self._dim(name)
        if dim is None:
            if any(not torch.equal(parts[0], other) for other in parts[1:]):
                file = self._sources[name][1][0]
                raise file.problem(f"its {shown(name)} differs from that of another rank")
            return parts[0]
        gated = bool(self.args and self.args.get("swiglu")) and "linear_fc1" in name
        if not gated:
            return torch.cat(parts, dim)
        halves = [part.chunk(2) for part in parts]  # each rank has its gates, then its ups
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])

    def updates(self) -> float | None:
        return self._steps[0] if self._steps and len(set(self._steps)) == 1 else None


def _numbered(name: str, first: int) -> str:
    """Return a name with the layer's number in the model, where `first` layers come before those of its part."""
    if not name.startswith(LAYERS):
        return name
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{int(layer) + first}.{rest}" if layer.isdecimal() else name


def _decays(name: str, tensor: PickledTensor) -> bool:
    return not name.endswith(".bias") and len(tensor.shape) > 1
