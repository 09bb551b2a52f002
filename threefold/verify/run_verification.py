"""Verification of a run before its first step: state outside the state dict, random draws, and the layout."""

import json
import os
import random
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from threefold.checkpoint.folder import from_first
from threefold.checksums import checksum_of
from threefold.comm.layout import Layout, LayoutSpec
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.model import CUSTOM
from threefold.config.schedules import find_schedule
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.exact.rules import GRAIN
from threefold.files import first_of, read_text
from threefold.foreign import FolderFiles, nofollow_folder
from threefold.models.custom_batch import batch_shapes
from threefold.models.sharding import ModelPlan
from threefold.models.source import MakeModel, ModelSource, construct, error_line, skeleton
from threefold.output import write_durably
from threefold.plugins import modules_beside
from threefold.random.rng import draws_in_sequence, generators_preserved
from threefold.torch_private.distributed import persistent_buffers
from threefold.torch_private.tensors import has_module_hooks, version_of
from threefold.train.callbacks.base import say
from threefold.verify.batches import BatchSource
from threefold.verify.module_check import OF_MODULES
from threefold.verify.proposal import has_forward
from threefold.verify.rank_worker import run_rank
from threefold.verify.reference import Trace, one_process, reference_loss
from threefold.verify.verifier import DEPARTS, choose_batches, judge

_ALIKE: Final = 1e-4
"""Largest relative difference at which gradients count as equal."""
_DEPTH, _MOST = 3, 1000
"""Depth and number of elements to which containers and objects in an attribute are inspected."""
_GENERATORS: Final[dict[str, Callable[[], object]]] = {
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "random": random.getstate,
    "numpy.random": lambda: repr(np.random.get_state(legacy=False)),
}


@dataclass(frozen=True)
class HiddenState:
    """Findings of `find_hidden_state`.

    Attributes:
        refusal: clause about state that the loss depends on but that is not a buffer; empty if there is none.
        drawing: the module that draws, and the generator it draws from; empty if none does.
        notes: sentences about attributes that forward changes without an effect on the loss so far.
    """

    refusal: str = ""
    drawing: str = ""
    notes: tuple[str, ...] = ()


def find_hidden_state(
    model: nn.Module, make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor]
) -> HiddenState:
    """Run a model's passes three times, and the passes of a newly made copy of it once, and compare them.

    All begin with equal parameters, buffers and generators. The first passes fill caches that a model computes once;
    the others are compared. `loss` returns a loss on some samples. The model, in training mode, and the generators
    are restored at the end.
    """
    names = model.state_dict().keys()
    with state_preserved(model):
        _passes(model, loss)
    if late := sorted(model.state_dict().keys() - names):
        return HiddenState(
            f"forward makes {late[0]!r}, which no optimizer, checkpoint or other rank knows; make it in the "
            "constructor, at its full size, and write to it in forward"
        )
    before = _attributes(model)
    with state_preserved(model), _watching(model) as drawing:
        first = _passes(model, loss)
    if not all(bool(each.isfinite().all()) for each in first):
        return HiddenState(
            f"{type(model).__name__} has a loss or gradients that are not finite with its initial weights, which equal "
            "nothing; correct its initial weights or its forward"
        )
    after = _attributes(model)
    with state_preserved(model):
        second = _passes(model, loss)
    changed = [place for place in after if before.get(place) != after[place]]
    if not _are_equal(first, second):
        return HiddenState(_told(model, changed))
    another = make()
    with torch.no_grad():
        for module, other in zip(model.modules(), another.modules(), strict=True):
            others = dict(_values(other))
            for name, value in _values(module):
                if name in others:
                    others[name].copy_(value)
    kept, made = _attributes(model, by_value=True), _attributes(another, by_value=True)
    with state_preserved(another):
        third = _passes(another, loss)
    if not _are_equal(first, third):
        return HiddenState(_told_made(kept, made))
    notes = (
        f"{_place(*place)} is a number that forward changes and no checkpoint has: a resumed run starts it anew."
        for place in changed
        if isinstance(after[place], int | float)
    )
    return HiddenState("", next(iter(drawing), ""), tuple(notes))


def _told(model: nn.Module, changed: Sequence[tuple[str, str]]) -> str:
    if not changed:
        return (
            f"{type(model).__name__} has another loss, or other gradients, when the same samples go through it again, "
            "though its weights, buffers and generators are the same, so that neither a resumed run nor another layout "
            "would compute the same; have forward depend on its inputs, parameters and buffers alone"
        )
    name, attribute = changed[0]
    module = model.get_submodule(name)
    if attribute in dict(module.named_buffers(recurse=False)):
        return (
            f"The buffer {attribute!r} of {name!r} is not persistent, forward changes it and the loss depends on it, "
            "so that a resumed run would compute something else; register it without persistent=False"
        )
    initial = "…" if isinstance(getattr(module, attribute), Tensor) else "torch.zeros(())"
    return (
        f"{_place(name, attribute)} is not a buffer, forward changes it and the loss depends on it, so that a resumed "
        "run would compute something else; make it one in the constructor, "
        f"self.register_buffer({attribute!r}, {initial})"
    )


def _told_made(kept: dict[tuple[str, str], object], made: dict[tuple[str, str], object]) -> str:
    differing = next((place for place in kept if kept[place] != made.get(place)), None)
    if differing is None:
        return (
            "the loss is another one in a model that is made anew with the same parameters and buffers, so that a "
            "resumed run would compute something else; have forward depend on inputs, parameters and buffers alone"
        )
    return (
        f"{_place(*differing)} is another one in a model that is made anew with the same parameters and buffers, and "
        "the loss depends on it, so that a resumed run would compute something else; have it follow from the "
        f"constructor's arguments, or make it a buffer, self.register_buffer({differing[1]!r}, …)"
    )


def _passes(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """Return the loss and the gradients of a backward pass, both of which may depend on hidden state."""
    model.zero_grad()
    mean = loss(model)
    if mean.requires_grad:
        mean.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return [mean.detach(), *gradients]


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether losses are equal, and gradients up to the order in which threads may sum."""
    if len(one) != len(other) or not torch.equal(one[0], other[0]):
        return False
    gradients = zip(one[1:], other[1:], strict=True)
    return all(a.shape == b.shape and bool((a - b).abs().max() <= _ALIKE * a.abs().max()) for a, b in gradients)


def _place(name: str, attribute: str) -> str:
    return f"The attribute {attribute!r} of {name!r}" if name else f"The attribute {attribute!r} of the model"


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """Collect the modules whose forward draws from a generator in the block, the innermost of the first ones first."""

    def states() -> dict[str, object]:
        return {name: state() for name, state in _GENERATORS.items()}

    found: list[str] = []
    begun = [states()]
    names = {module: name for name, module in model.named_modules()}

    def before(_module: nn.Module, _inputs: Any) -> None:
        begun.append(states())

    def after(module: nn.Module, _inputs: Any, _output: Any) -> None:
        note(repr(names[module]) if names[module] else "The model")

    def note(place: str) -> None:
        earlier, now = begun.pop(), states()
        found.extend(f"{place} draws from {name}" for name in now if now[name] != earlier[name])

    handles = [module.register_forward_pre_hook(before) for module in names]
    handles += [module.register_forward_hook(after) for module in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    note("The model")


def _values(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *persistent_buffers(module)]


@contextmanager
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Restore parameters, persistent buffers and generators after the block."""
    kept = [(module, *each, each[1].detach().clone()) for module in model.modules() for each in _values(module)]
    with generators_preserved():
        yield
    with torch.no_grad():
        for module, name, value, before in kept:
            setattr(module, name, value)
            value.copy_(before)


def _attributes(model: nn.Module, by_value: bool = False) -> dict[tuple[str, str], object]:
    """Return marks of the values of each attribute of each module, and of each buffer that is not persistent.

    Marks `by_value` can be compared with those of another model.
    """
    found: dict[tuple[str, str], object] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in OF_MODULES:
                found[name, attribute] = _mark(value, _DEPTH, by_value)
        persistent = dict(persistent_buffers(module))
        for attribute, value in module.named_buffers(recurse=False, remove_duplicate=False):
            if attribute not in persistent:
                found[name, attribute] = _mark(value, _DEPTH, by_value)
    return found


def _mark(value: Any, depth: int, by_value: bool = False) -> object:
    """Return an object that is equal as long as a value stays unchanged."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if by_value:
            return None if value.is_meta else value.detach().tolist()
        return (id(value), version_of(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    mark = partial(_mark, depth=depth - 1, by_value=by_value)
    if isinstance(value, nn.Module | type) or callable(value) or not depth:
        return None if by_value else id(value)
    if isinstance(value, Mapping):
        return [(mark(key), mark(each)) for key, each in islice(value.items(), _MOST)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [len(value), *(mark(each) for each in islice(value, _MOST))]
    if hasattr(value, "__dict__"):
        return _mark(vars(value), depth, by_value)
    return None if by_value else id(value)


FILE: Final = "verified.json"
"""File in the run's folder with the checksums of layouts that were found equal."""
_PARTIAL: Final = "verify.partial"
STEPS: Final = 2
"""Number of steps; the second uses buffers that the first has changed."""
TOLERANCE: Final = 1e-3
"""Largest relative error that counts as rounding: less than a layer that depends on the layout causes, and more than
the rounding of an unusual model, as every run makes this check."""
MOST_PARAMETERS: Final = 20_000_000
"""Largest number of parameters that rank 0 runs in one process: some 0.8 GB with gradients and copies."""
MOST_WORK: Final = 5e9
"""Largest number of multiply-adds of a forward pass in one process: seconds for three forward passes and two steps."""
MOST_POSITIONS: Final = 2**16
"""Largest number of positions whose activations one process holds at once, even of a model of few parameters."""
_SAMPLES: Final = 2
"""Maximum number of samples per micro-batch, where one process does not run the global batch."""
_OF_TRAINING: Final = (
    *("seed", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "loss_chunk_size"),
    *("recompute", "recompute_every"),
)
"""Settings of `train` that the result depends on."""
DRAWS: Final = (
    "whose numbers depend on the layout, its micro-batches and recomputation; use threefold.Dropout with samples.keys, "
    "samples being a parameter of the layer's forward"
)
_VERSIONED: Final = {"torch", "threefold"}
"""Packages that are identified by their versions."""
_KEPT: Final = 32
"""Number of results that a run's folder keeps."""


_Prepared = tuple[tuple[str, ...], str, Config | None]
"""Findings of rank 0 before the ranks compare: lines to print; a checksum of everything that the result depends on,
empty if the result is not to be kept; the config with which one process has computed its part and the ranks follow,
None if they do not."""


def verify_run(config: Config, run_dir: Path, source: ModelSource, mesh: Mesh) -> None:
    """Check that a run's layout computes the same as one process. Collective over the world.

    Nothing is checked if `train.verify` is false, for a built-in model, or for a model that was found equal before. A
    model that is too large, or does not run in one process, is skipped with a line that says so. Generators are
    unchanged.

    Raises:
        UserError: on every rank, if the results differ, or the model keeps state that no checkpoint stores.
    """
    if config.model.architecture != CUSTOM or not config.train.verify:
        return
    began, folder = time.monotonic(), run_dir / _PARTIAL

    def prepare() -> _Prepared:
        with mesh.without_collectives():
            return _prepare(config, small, run_dir, source, rows)

    with generators_preserved(mesh.device):
        try:
            small, rows = _trial(config, _SAMPLES), choose_batches(config, source.loss(config))
        except UserError as error:  # depends only on the run's sizes, so it is the same on every rank
            if mesh.rank == 0:
                say(f"Not verified against one process: a few samples do not go with the settings ({error})")
            return
        try:
            lines, key, trial = from_first(mesh.world, prepare)
            line = "" if trial is None else _compare(config, trial, source, rows, mesh, folder)
        finally:
            if mesh.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if mesh.rank == 0:
        for each in lines:
            say(each)
        if line:
            say(f"{line}; {time.monotonic() - began:.1f} s.")
        if key:
            known = [*_remembered(run_dir)[-_KEPT + 1 :], key]
            with suppress(OSError):  # otherwise the next run verifies again
                write_durably(run_dir / FILE, json.dumps(known, indent=2) + "\n")


def _trial(config: Config, samples: int | None = None) -> Config:
    """Return the run's config with SGD and fp32.

    The layout stays the same. With `samples`, the maximum per micro-batch, there are two micro-batches, or the fewest
    that the schedule takes, if it has several.
    """
    sections = {name: dict(values) for name, values in config.sections().items()}
    parallel, train = config.parallel, config.train
    count = train.global_batch_size // parallel.dp // train.micro_batch_size
    if samples is not None and count > 1:
        schedule = find_schedule(parallel.schedule)
        accepted = (n for n in range(2, count) if parallel.pp == 1 or schedule.accepts(parallel.pp, n))
        count = next(accepted, count)
    size = min(train.micro_batch_size, samples or train.micro_batch_size)
    # Bits are not compared here, and the samples are few.
    for key in ("micro_batch_size", "callbacks", "epochs", "max_seconds", "spike_factor", "exact", *GRAIN):
        sections["train"].pop(key, None)
    batch = {"global_batch_size": parallel.dp * count * size, "gradient_accumulation_steps": count}
    sections["train"] |= {**batch, "device": "cpu", "compile": False}
    sections["parallel"]["gradient_compression"] = "none"
    sections["parallel"].pop("fallbacks", None)
    sections["precision"] = {"dtype": "fp32"}
    sections["optimizer"] = {"name": "sgd", "lr": 0.01, "warmup_steps": 0, "clip_grad_norm": 1.0}
    return resolve(config_of(sections), vocab_size=1)


def _prepare(config: Config, small: Config, run_dir: Path, source: ModelSource, rows: BatchSource) -> _Prepared:
    """Look for state outside the state dict, and compute the reference in one process.

    Raises a `UserError` if there is such state, or if the model draws random numbers that depend on the layout.
    """
    key = _key(config, small, source)
    if key and key in _remembered(run_dir):
        return (), "", None
    try:
        make_model, plan = source.load(small)
        of_few, of_all = _reasons(config, small, make_model, rows)
        if of_few:
            return (not_verified(of_few),), "", None
        trial = small if of_all else _trial(config)
        model = construct(make_model, trial.train.seed)
        batch, loss, other = rows.batch(trial, 0), source.loss(trial), ""
        of_batch = partial(reference_loss, plan=plan, batch=batch, step=0, config=trial, loss=loss)
        found = find_hidden_state(model, partial(construct, make_model, trial.train.seed), of_batch)
        if loss is not None and not found.refusal and not found.drawing:
            other = other_forward(model, plan, of_batch)
        if not (found.refusal or found.drawing or other):
            trace = one_process(make_model, plan, trial, rows, STEPS, loss)
            shutil.rmtree(run_dir / _PARTIAL, ignore_errors=True)
            trace.save(nofollow_folder(run_dir / _PARTIAL))
    except Exception as error:  # for example of a model that runs only layer by layer
        return (not_verified(not_run(error)),), "", None
    name = source.describe(config)
    if refusal := found.refusal or other:
        raise UserError(f"{name}: {refusal}; or set train.verify to false to train all the same.")
    is_split = Layout.from_config(config.parallel).world_size > 1 or trial.train.gradient_accumulation_steps > 1
    if found.drawing and (is_split or config.train.recompute != "none"):
        raise UserError(f"{name}: {found.drawing}, {DRAWS}; or set train.verify to false to train all the same.")
    return (*found.notes, *_notes_of_hooks(model)), key, None if found.drawing else trial


def _notes_of_hooks(model: nn.Module) -> list[str]:
    """Return a sentence about hooks, which may change what the layers compute, so that the check keeps them."""
    hooked = [name or "the model" for name, module in model.named_modules() if has_module_hooks(module)]
    if not hooked:
        return []
    return [
        f"The passes of this check also call the hooks of {first_of(hooked, 3)}; if these count or log, set "
        "train.verify to false."
    ]


def not_verified(reason: str) -> str:
    """Return the line about a layout that is not compared with one process."""
    return f"Not verified against one process: {reason}."


def not_run(error: Exception) -> str:
    """Return the reason of a model that raises an error in one process, for example as it runs only in layers."""
    return f"one process does not run it ({error_line(error)})"


def other_forward(model: nn.Module, plan: ModelPlan, of_batch: Callable[..., Tensor]) -> str:
    """Return a clause about a model whose forward computes something else than its layers; empty if it does not."""
    if not has_forward(model):
        return ""
    with torch.no_grad(), state_preserved(model):
        whole = of_batch(model).item()
    with torch.no_grad(), state_preserved(model):
        in_layers = of_batch(model, by_layers=True).item()
    if abs(whole - in_layers) <= TOLERANCE * abs(whole):
        return ""
    return (
        f"its forward computes a loss of {whole:.5g} and its layers, one after another, {in_layers:.5g}, and training "
        f"calls the layers ({plan.layers[0]} … {plan.layers[-1]}) alone; move into a layer what forward does between "
        "them"
    )


def too_large(parameters: int, positions: int, samples: int, draws: bool) -> str:
    """Return why one process does not run a model; empty if it does.

    Args:
        parameters: number of its parameters.
        positions: number of positions of the batch, as `positions_of` counts them.
        samples: number of samples of the batch.
        draws: whether it draws from random streams.
    """
    if draws:
        return "it draws from random streams, which depend on the layout"
    if parameters > MOST_PARAMETERS:
        return f"the model has {parameters:,} parameters, more than {MOST_PARAMETERS:,}"
    if parameters * positions > MOST_WORK or positions > MOST_POSITIONS:
        return f"its {samples:,} samples would take one process long"
    return ""


def positions_of(batch: Any) -> int:
    """Return about how often a batch uses the weights: the elements of its tensors, without the last dim of floats."""
    shapes = [((), batch.tokens.shape, torch.int64)] if isinstance(batch, Batch) else batch_shapes(batch)
    return max(prod(shape[:-1] if dtype.is_floating_point else shape) for _, shape, dtype in shapes)


def _reasons(config: Config, small: Config, make_model: MakeModel, rows: BatchSource) -> tuple[str, str]:
    """Return why one process does not run a model with the few samples of `small`, and with the global batch."""
    if config.train.device != "cpu":
        return (f"the run is on {config.train.device}; use threefold verify",) * 2
    model = skeleton(make_model, small.train.seed)
    draws = any(draws_in_sequence(module) for module in model.modules())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    few, every = (each.train.global_batch_size for each in (small, config))
    positions = positions_of(rows.batch(small, 0))
    found = (too_large(parameters, positions * each // few, each, draws) for each in (few, every))
    advice = "" if draws else "; use threefold verify"
    of_few, of_all = (f"{reason}{advice}" if reason else "" for reason in found)
    return of_few, of_all


def _compare(config: Config, trial: Config, source: ModelSource, rows: BatchSource, mesh: Mesh, folder: Path) -> str:
    """Compute the steps in the layout; return the line that reports equality, or raise a `UserError`."""
    began = time.monotonic()
    # Read before the ranks meet, as the first one may remove the folder afterwards.
    spec, order = LayoutSpec(Layout.from_config(config.parallel)), list(Trace.load(folder).initial)
    reports = mesh.world.gather_objects(run_rank(source, trial, rows, STEPS, str(folder), mesh=mesh))
    result = judge(spec, reports, order, TOLERANCE, time.monotonic() - began, None)
    count, samples = trial.train.gradient_accumulation_steps, trial.train.global_batch_size
    layout = str(spec.layout)
    if spec.layout.world_size == 1:
        layout = f"{count} micro-batches" if count > 1 else f"{len(source.load(trial)[1].layers)} layers one by one"
    if result.verdict == DEPARTS and result.first is not None:
        first = result.first
        raise UserError(
            f"{source.describe(config)} does not compute in {layout} what it computes in one process: the first "
            f"departure is the {first} ({first.where(spec.layout)}), by a relative error of {first.relative:.1e}; "
            "`threefold verify` shows the others, and train.verify: false trains all the same."
        )
    worst = 0.0 if result.worst is None else result.worst.relative
    line = f"Verified {layout} against one process: {STEPS} steps of {samples} samples are equal ({worst:.0e})"
    usual = config.train.global_batch_size
    return line if samples == usual else f"{line}; the run's {usual:,} would take one process long and were not tried"


def _key(config: Config, small: Config, source: ModelSource) -> str:
    """Return the checksum of everything that the result depends on; empty if the model's files are not known."""
    files = source.files(config)
    if not files:
        return ""
    make_model, plan = source.load(small)
    beside = {each for file in files for each in modules_beside(file)}
    every = sorted({*files, *beside, *_loaded(files, skeleton(make_model, small.train.seed))})
    sharding = (plan.split, plan.layers, plan.ties, plan.recompute, plan.shared, plan.standalone)
    model = {key: value for key, value in small.sections()["model"].items() if key != "file"}
    parts = [
        (torch.__version__, version("threefold"), source.describe(config), repr(sharding), model),
        *({name: each.sections()["train"].get(name) for name in _OF_TRAINING} for each in (config, small)),
        *(small.sections()[name] for name in ("data", "parallel")),
        *(read_text(file) for file in every),
    ]
    return checksum_of(json.dumps(parts, default=str).encode())


def _loaded(files: Sequence[Path], model: nn.Module) -> set[Path]:
    """Return the files of imported modules in the folders of `files` and in the packages of the model's layers."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - _VERSIONED
    folders = tuple(f"{file.resolve().parent}{os.sep}" for file in files)
    found = set()
    for name, module in list(sys.modules.items()):
        path, package = getattr(module, "__file__", None) or "", name.partition(".")[0]
        is_beside = path.startswith(folders) and not path.startswith(sys.prefix) and package not in _VERSIONED
        if path.endswith(".py") and (package in packages or is_beside):
            found.add(Path(path))
    return found


def _remembered(run_dir: Path) -> list[str]:
    with suppress(UserError, ValueError):
        found = FolderFiles(run_dir).json(FILE)
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
    return []
