"""Lines at the beginning of a run: its model, layout, data and stages."""

import torch

from threefold.config.by_step import described, entries_of
from threefold.data.loader import Loader
from threefold.files import counted, how_often
from threefold.models.sharding import ModelPlan
from threefold.models.source import MakeModel
from threefold.parallel.pipeline.partition import StageMap, stage_map
from threefold.train.callbacks.base import RunContext, say


def announce(run: RunContext, loader: Loader, make_model: MakeModel, plan: ModelPlan) -> None:
    """Print what begins: model, layout, data, and the stages of a pipeline if the log has the `fleet` format."""
    config, mesh = run.config, run.mesh
    with torch.device("meta"):
        model = make_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train = config.train
    samples, read = len(loader.train), loader.consumed.before(train.max_steps) / loader.parts
    length = "" if loader.is_nested else f" of {described(config.data.sequence_length)} tokens"
    dtype = f"{config.precision.dtype} with float8 products" if config.precision.fp8 else config.precision.dtype
    corpora = list(config.data.corpora)
    data = corpora[0] if len(corpora) == 1 else f"{len(corpora)} corpora"
    say(
        f"Training {parameters:,} parameters ({config.model.title}) in {dtype} on {mesh.device.type}, "
        f"{mesh.layout}: {data} → {run.run_dir}"
    )
    steps, (first, *later) = counted(train.max_steps, "step"), entries_of(train.global_batch_size)
    batch = counted(first[1], "sample")
    length += "".join(f", {size:,} from step {step + 1:,} on" for step, size in later)
    verb = "read" if train.max_steps > 1 else "reads"
    say(f"{steps} of {batch}{length} {verb} the {counted(samples, 'training sample')} {how_often(read / samples)}.")
    for note in loader.train.notes:
        say(f"  {note}")
    changes = any(len(entries_of(weight)) > 1 for weight in config.data.corpora.values())
    for name, epochs in loader.train.epochs(int(read)).items():
        part = next(part for part in loader.train.parts if part.name == name)
        share = epochs * len(part.samples) / read if changes else part.weight
        say(f"  {share:.2%} are from {name}, whose {len(part.samples):,} samples are read {how_often(epochs)}.")
    if mesh.pp.size > 1 and config.log.format == "fleet":
        _announce_stages(model, plan, stage_map(plan, config))


def _announce_stages(model: torch.nn.Module, plan: ModelPlan, stages: StageMap) -> None:
    """Print each stage's pp rank, parameters and layers; a tied weight counts at the first stage that uses it."""
    counted: set[torch.nn.Parameter] = set()
    for number, place in enumerate(stages.ranks):
        first, end = stages.layers(number)
        names = plan.layers[first:end]
        held = {parameter for name in names for parameter in model.get_submodule(name).parameters()} - counted
        counted |= held
        layers = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        count = sum(parameter.numel() for parameter in held)
        say(f"Stage {number} on pp rank {place}: {layers}, {count:,} parameters.")
        kinds = (type(model.get_submodule(name)).__name__ for name in names)
        say("  " + ", ".join(f"{first + n} {names[n]} ({kind})" for n, kind in enumerate(kinds)))
