"""Log-probabilities of the answers under the starting weights: computed once, and kept in a file of the run."""

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from threefold.checkpoint.folder import from_first
from threefold.checksums import checksum_of, seal, unseal
from threefold.comm.heartbeat import Activity
from threefold.config import Config
from threefold.data.dataset import Dataset, stored_corpus
from threefold.errors import UserError
from threefold.files import load_json, parse_json, shown
from threefold.foreign import MANIFEST, FolderFiles
from threefold.output import write_durably
from threefold.preference.door import RUN_FILES
from threefold.preference.head import PreferenceHead
from threefold.preference.pairs import PreferencePairs
from threefold.random import Float64Array
from threefold.report.progress import Steps
from threefold.train.callbacks.base import RunContext, say
from threefold.train.run import Parts, open_loader
from threefold.train.state import StartingPoint
from threefold.train.step import Engine

_PARTS: Final = ("train", "valid")
_LARGEST: Final = 2 << 30  # bytes of the file, with some forty million pairs


def with_references(run: RunContext, engine: Engine, samples: Parts, dataset: Dataset, start: StartingPoint) -> Parts:
    """Return a run's samples with their reference log-probabilities, from the run's file or computed now.

    Collective over the world. Raises a `UserError` on every rank if the weights that they belong to are gone.
    """
    config, world = run.config, run.mesh.world
    path = run.run_dir / RUN_FILES["references"]
    of_data = _of_data(config, dataset, samples)
    facts = {"data": of_data, "weights": from_first(world, lambda: _of_weights(config, start))}
    stored = from_first(world, lambda: _read(path, facts, start.step))
    if stored is None:
        started = time.monotonic()
        found = {name: reference_logps(run, engine, part) for name, part in _named(samples)}
        stored = {name: values.tolist() for name, values in found.items()}
        told = json.dumps(seal({**facts, "logps": stored})) + "\n"
        from_first(world, lambda: write_durably(path, told))
        if world.is_first:
            count, seconds = sum(map(len, found.values())), time.monotonic() - started
            say(f"Reference log-probabilities of {count:,} pairs took {seconds:.1f} s → {shown(path)}")
    known = {name: part.with_references(np.array(stored[name])) for name, part in _named(samples)}
    return known["train"], known.get("valid")


def reference_logps(run: RunContext, engine: Engine, part: PreferencePairs) -> Float64Array:
    """Compute the log-probability of each answer of `part` in a forward pass: [samples, 2]. Collective."""
    size, mesh = int(run.config.train.global_batch_size), engine.mesh
    heads = [each for stage in engine.stages for each in stage.modules() if isinstance(each, PreferenceHead)]
    values = torch.zeros(len(part) + 1, 2, dtype=torch.float64, device=mesh.device)  # the last row is of what fills up
    with closing(open_loader(run.config, (part, part), mesh.dp)) as loader:
        total = loader.eval_batch_count()
        with Steps(f"reference log-probabilities of {len(part):,} pairs", total, shown=mesh.world.is_first) as steps:
            for number, batch in enumerate(loader.eval_batches()):
                mesh.heartbeat.activity(Activity.DATA)
                engine.eval_batch(batch)
                for rows in (each for head in heads for each in head.take_rows()):
                    places = (rows[:, 0].long() + number * size).clamp(max=len(part))
                    values[places] = rows[:, 1:]
                steps.advance()
    if not (heads and mesh.tp.is_first and mesh.cp.is_first):
        values.zero_()
    return mesh.world.all_reduce(values)[:-1].cpu().numpy()


def _named(samples: Parts) -> Iterator[tuple[str, PreferencePairs]]:
    for name, part in zip(_PARTS, samples, strict=True):
        if isinstance(part, PreferencePairs):
            yield name, part


def _of_data(config: Config, dataset: Dataset, samples: Parts) -> dict[str, Any]:
    """Return what the pairs follow from, as JSON values."""
    length, pairs = int(config.data.sequence_length), {name: len(part) for name, part in _named(samples)}
    corpora = {name: stored_corpus(dataset.sources_of(name)[0].data, length) for name in pairs}
    contents = {name: dataclasses.asdict(corpus.content) for name, corpus in corpora.items()}
    return {"contents": contents, "split": config.data.split, "length": length, "pairs": pairs}


def _of_weights(config: Config, start: StartingPoint) -> dict[str, Any]:
    """Return what the starting weights follow from, as JSON values; on the first rank."""
    sections = {name: values for name, values in config.sections().items() if name in ("model", "adapter", "precision")}
    carried = start.carried
    read = "" if carried is None else FolderFiles(carried.path).text(MANIFEST)
    begun = {"seed": config.train.seed} if carried is None else {"checkpoint": checksum_of(read.encode())}
    return dict(load_json(json.dumps({**sections, **begun})))


def _read(path: Path, facts: dict[str, Any], step: int) -> dict[str, Any] | None:
    """Return the log-probabilities of the file; None if they are to be computed, as long as `step` is 0."""
    files, known = FolderFiles(path.parent), None
    is_there = files.holds(path.name)
    with suppress(UserError):
        known = unseal(parse_json(files.text(path.name, limit=_LARGEST), shown(path))) if is_there else None
    if known is None:
        what = "is damaged" if is_there else "does not exist"
    elif known["data"] != facts["data"]:
        what = "is of other data, another data.split or another data.sequence_length"
    elif not step and known["weights"] != facts["weights"]:
        what = ""
    else:
        return dict(known["logps"])
    if step:
        raise UserError(
            f"{shown(path)} {what}, and the run resumes after step {step:,}, where the starting weights that it would "
            "be computed with are gone; put the run's own file back, or start a new run with train.init_from."
        )
    return None
