"""The short check that a run of an own model makes of its layout before its first step, in its own ranks.

Rank 0 computes two steps of a few samples in one process, then all ranks compute them in the run's layout and compare;
a run of one rank and one micro-batch too, as it calls the model's layers one by one, and not its forward.
The optimizer is SGD and the dtype fp32, whatever the run's are: a forward and a backward pass are what an own model
brings along.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from threefold.checkpoint.selection import from_first
from threefold.checksums import checksum_of
from threefold.comm.layout import Layout
from threefold.comm.layout_spec import LayoutSpec
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.model import OWN
from threefold.config.schedules import find_schedule
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.files import read_text
from threefold.models.construct import construct, skeleton
from threefold.models.constructor import told
from threefold.models.loss_terms import LossFunction
from threefold.models.own_batch import batch_shapes
from threefold.models.sharding import ModelPlan
from threefold.models.source import MakeModel, ModelSource
from threefold.output.durable import write_durably
from threefold.plugins import modules_beside
from threefold.random.generators import generators_preserved
from threefold.random.rng import draws_in_sequence
from threefold.train.callbacks.console import say
from threefold.verify.batches import BatchSource
from threefold.verify.hidden_state import HiddenState, find_hidden_state, state_preserved
from threefold.verify.rank_worker import run_rank
from threefold.verify.reference import Trace, has_forward, one_process, reference_loss
from threefold.verify.report import DEPARTS, judge
from threefold.verify.verifier import choose_batches

FILE: Final = "verified.json"
"""In the run's folder: the checksums of what was found equal."""
_PARTIAL: Final = "verify.partial"
STEPS: Final = 2
"""In the second, buffers matter that the first has changed."""
TOLERANCE: Final = 1e-3
"""The largest relative error that counts as rounding. A layer that depends on the layout is off by more; and a check
that every run makes must not take the rounding of an unusual model for a mistake."""
MOST_PARAMETERS: Final = 20_000_000
"""Of the whole model, up to which rank 0 makes it in one process: some 0.8 GB with gradients and copies."""
MOST_WORK: Final = 5e9
"""Multiply-adds of a forward pass of the samples, up to which one process computes them: seconds, as it makes three
forward passes and two steps."""
_SAMPLES: Final = 2
"""Of a micro-batch at most."""
_OF_TRAINING: Final = (
    *("seed", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "loss_chunk_size"),
    *("recompute", "recompute_every"),
)
"""The settings of `train` that the result depends on."""
_VERSIONED: Final = {"torch", "threefold"}
"""Packages that are known by their versions."""
_KEPT: Final = 32
"""Results that are remembered in a run's folder."""


@dataclass(frozen=True)
class _Prepared:
    """Findings of rank 0 before the ranks compare.

    Attributes:
        lines: to print.
        key: checksum of all that the result depends on; empty where it is not to be kept.
        compares: whether one process has computed its part, and the ranks follow.
    """

    lines: tuple[str, ...] = ()
    key: str = ""
    compares: bool = False


def self_check(config: Config, run_dir: Path, source: ModelSource, mesh: Mesh) -> None:
    """Check that a run's layout computes what one process computes. Collective over the world.

    Nothing is checked where `train.verify` is false, of a model of this package, or of one that was found equal before.
    What is too large, or does not run in one process, is not either, as a line says. Generators stay as they are.

    Args:
        config: of the run, resolved.
        run_dir: shared by all ranks.
        source: of the model.
        mesh: of the run.

    Raises:
        UserError: on every rank, when it does not, or keeps state that no checkpoint has.
    """
    if config.model.architecture != OWN or not config.train.verify:
        return
    began, folder = time.monotonic(), run_dir / _PARTIAL
    with generators_preserved(mesh.device):
        try:
            small, rows = _small(config), choose_batches(config, source.loss(config))
        except UserError as error:  # settings that go with the run's sizes alone; the same on every rank
            if mesh.rank == 0:
                say(f"Not verified against one process: a few samples do not go with the settings ({error})")
            return
        try:
            found = from_first(mesh.world, lambda: _prepare(config, small, run_dir, source, rows))
            line = _compare(config, small, source, rows, mesh, folder) if found.compares else ""
        finally:
            if mesh.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if mesh.rank == 0:
        for each in found.lines:
            say(each)
        if line:
            say(f"{line}; {time.monotonic() - began:.1f} s.")
        if found.key:
            _remember(run_dir, found.key)


def _small(config: Config) -> Config:
    """The run's config with a few samples, SGD and fp32; its layout is as it was, with two micro-batches or the fewest
    that the schedule takes where it has several."""
    sections = {name: dict(values) for name, values in config.sections().items()}
    parallel, train = config.parallel, config.train
    share = train.global_batch_size // parallel.dp
    count, schedule = share // train.micro_batch_size, find_schedule(parallel.schedule)
    if count > 1:
        count = next(
            n for n in range(2, count + 1) if parallel.pp == 1 or schedule.accepts(parallel.pp, n) or n == count
        )
    size = min(train.micro_batch_size, _SAMPLES)
    for key in (
        "micro_batch_size",
        "gradient_accumulation_steps",
        "callbacks",
        "epochs",
        "max_seconds",
        "spike_factor",
    ):
        sections["train"].pop(key, None)
    sections["train"] |= {
        "global_batch_size": parallel.dp * count * size,
        "gradient_accumulation_steps": count,
        "device": "cpu",
        "compile": False,
    }
    sections["parallel"] |= {"gradient_compression": "none"}
    sections["parallel"].pop("fallbacks", None)
    sections["precision"] = {"dtype": "fp32"}
    sections["optimizer"] = {"name": "sgd", "lr": 0.01, "warmup_steps": 0, "clip_grad_norm": 1.0}
    return resolve(config_of(sections), vocab_size=1)


def _prepare(config: Config, small: Config, run_dir: Path, source: ModelSource, rows: BatchSource) -> _Prepared:
    """Look for state outside of the state dict, and compute in one process what is to be compared.

    Raises:
        UserError: there is such state; or the model draws where the layout decides what it gets.
    """
    key = _key(config, small, source)
    if key and key in _remembered(run_dir):
        return _Prepared()
    is_split = Layout.of(config.parallel).world_size > 1 or small.train.gradient_accumulation_steps > 1
    try:
        reason, found, other = "", HiddenState(), ""
        make_model, plan = source.load(small)
        reason = _too_large(config, small, make_model, rows)
        if not reason:
            model = construct(make_model, small.train.seed)
            batch, loss = rows.batch(small, 0), source.loss(small)
            found = find_hidden_state(
                model,
                partial(construct, make_model, small.train.seed),
                partial(reference_loss, plan=plan, batch=batch, step=0, config=small, loss=loss),
            )
            if loss is not None and not found.refusal and not found.drawing:
                other = _other_forward(model, plan, batch, small, loss)
            if not (found.refusal or found.drawing or other):
                trace = one_process(make_model, plan, small, rows, STEPS, loss)
                (run_dir / _PARTIAL).mkdir(exist_ok=True)
                trace.save(run_dir / _PARTIAL)
    except Exception as error:  # of a model that runs in layers alone, for one
        reason = f"one process does not run it ({told(error)})"
    if reason:
        return _Prepared((f"Not verified against one process: {reason}.",))
    name = source.describe(config)
    if refusal := found.refusal or other:
        raise UserError(f"{name}: {refusal}; or set train.verify to false to train all the same.")
    if found.drawing and (is_split or config.train.recompute != "none"):
        raise UserError(
            f"{name}: {found.drawing}, whose numbers depend on the layout, its micro-batches and what is computed "
            "again; use threefold.Dropout with samples.keys, samples being a parameter of the layer's forward; or set "
            "train.verify to false to train all the same."
        )
    return _Prepared(found.notes, key, compares=not found.drawing)


def _other_forward(model: nn.Module, plan: ModelPlan, batch: Any, small: Config, loss: LossFunction) -> str:
    """Return a clause about a model whose forward computes something else than its layers; empty where it does not."""
    if not has_forward(model):
        return ""
    with torch.no_grad(), state_preserved(model):
        whole = reference_loss(model, plan, batch, 0, small, loss).item()
    with torch.no_grad(), state_preserved(model):
        by_layers = reference_loss(model, plan, batch, 0, small, loss, by_layers=True).item()
    if abs(whole - by_layers) <= TOLERANCE * abs(whole):
        return ""
    return (
        f"its forward computes a loss of {whole:.5g} and its layers, one after another, {by_layers:.5g}, and training "
        f"calls the layers ({plan.layers[0]} … {plan.layers[-1]}) alone; move into a layer what forward does between "
        "them"
    )


def _too_large(config: Config, small: Config, make_model: MakeModel, rows: BatchSource) -> str:
    """Return why a model is not run in one process; empty where it is."""
    if config.train.device != "cpu":
        return f"the run is on {config.train.device}; use threefold verify"
    model = skeleton(make_model, small.train.seed)
    if any(draws_in_sequence(module) for module in model.modules()):
        return "it draws from random streams, which depend on the layout"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        return f"the model has {parameters:,} parameters, more than {MOST_PARAMETERS:,}; use threefold verify"
    work = parameters * _positions(rows.batch(small, 0))
    if work > MOST_WORK:
        return f"its {small.train.global_batch_size:,} samples would take one process long; use threefold verify"
    return ""


def _positions(batch: Any) -> int:
    """How often a batch uses the weights, about: the places of its tensors, without the last dim of floats."""
    if isinstance(batch, Batch):
        return batch.tokens.numel()
    return max(prod(shape[:-1] if dtype.is_floating_point else shape) for _, shape, dtype in batch_shapes(batch))


def _compare(config: Config, small: Config, source: ModelSource, rows: BatchSource, mesh: Mesh, folder: Path) -> str:
    """Compute the steps in the layout; returns the line that says that they are equal.

    Raises:
        UserError: they are not.
    """
    began = time.monotonic()
    # Read before the ranks meet: after that the first one may have removed the folder.
    spec, order = LayoutSpec(Layout.of(config.parallel)), list(Trace.load(folder).initial)
    reports = mesh.world.gather_objects(run_rank(source, small, rows, STEPS, str(folder), mesh=mesh))
    result = judge(spec, reports, order, TOLERANCE, time.monotonic() - began, None)
    layout, samples = _said(config, small, source), small.train.global_batch_size
    if result.verdict == DEPARTS and result.first is not None:
        first = result.first
        raise UserError(
            f"{source.describe(config)} does not compute in {layout} what it computes in one process: the first "
            f"departure is the {first} ({first.where(spec.layout)}), by a relative error of {first.relative:.1e}; "
            "`threefold verify` shows the others, and train.verify: false trains all the same."
        )
    worst = 0.0 if result.worst is None else result.worst.relative
    return f"Verified {layout} against one process: {STEPS} steps of {samples} samples are equal ({worst:.0e})"


def _said(config: Config, small: Config, source: ModelSource) -> str:
    """The layout, or the micro-batches or layers of one that has nothing else."""
    layout = Layout.of(config.parallel)
    count = small.train.gradient_accumulation_steps
    if layout.world_size > 1:
        return str(layout)
    return f"{count} micro-batches" if count > 1 else f"{len(source.load(small)[1].layers)} layers one by one"


def _key(config: Config, small: Config, source: ModelSource) -> str:
    """The checksum of all that the result depends on; empty where the files of the model are not known."""
    files = source.files(config)
    if not files:
        return ""
    make_model, plan = source.load(small)
    beside = {each for file in files for each in modules_beside(file)}
    every = sorted({*files, *beside, *_loaded(files, skeleton(make_model, small.train.seed))})
    sharding = (plan.split, plan.layers, plan.ties, plan.recompute, plan.shared, plan.bare)
    model = {key: value for key, value in small.sections()["model"].items() if key != "file"}
    parts = [
        (torch.__version__, version("threefold"), source.describe(config), repr(sharding), model),
        {name: small.sections()["train"].get(name) for name in _OF_TRAINING},
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
    try:
        found = json.loads(read_text(run_dir / FILE))
    except (UserError, ValueError):
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _remember(run_dir: Path, key: str) -> None:
    with suppress(OSError):  # then it is verified again
        write_durably(run_dir / FILE, json.dumps([*_remembered(run_dir)[-_KEPT + 1 :], key], indent=2) + "\n")
