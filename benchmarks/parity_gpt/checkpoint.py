"""Checkpoints that any layout can load: each rank writes its part of what it holds; and the export of a model."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batches import Sampler
from .gradients import flat_part
from .model import Stage, layout, named
from .optimizer import Optimizer
from .run import Run


def save(
    folder: str, run: Run, stage: Stage, optimizer: Optimizer, sampler: Sampler, buffers: dict[str, Tensor]
) -> None:
    """Write this rank's file of the checkpoint of the current step.

    Args:
        folder: folder of checkpoints.
        run: the run.
        stage: this rank's stage.
        optimizer: its optimizer.
        sampler: the data's sampler.
        buffers: the stage's buffers, as they were registered.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for name, weight in named(stage).items():
        axis = optimizer.axis(name)
        parts = {"weight": flat_part(weight.detach(), axis)}
        for key, state in optimizer.states[name].items():
            parts[key] = state.clone() if optimizer.sharded(name) else flat_part(state, axis)
        at = layout(weight)
        tensors[name] = {"shape": at.shape, "pieces": at.pieces(), "local": tuple(weight.shape), "parts": parts}
    grid = run.grid
    document = {
        "tensors": tensors,
        "buffers": buffers,
        "generator": run.generator.get_state(),
        "sampler": sampler.state(),
        "steps": optimizer.steps,
        "step": run.step,
        "rank": grid.rank,
    }
    path = Path(folder) / f"step-{run.step}"
    path.mkdir(parents=True, exist_ok=True)
    torch.save(document, path / f"rank-{grid.rank}.pt")
    if dist.is_initialized():
        dist.barrier()


def read(run: Run) -> list[dict[str, Any]]:
    """Return the files of the checkpoint to continue from, by rank."""
    folder = Path(run.options.load)
    steps = sorted(int(each.name.split("-")[1]) for each in folder.glob("step-*"))
    wanted = run.options.load_step
    step = steps[-1] if wanted < 0 or run.mistake("deepspeed-8499") else wanted
    files = sorted((folder / f"step-{step}").iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    return [torch.load(path, weights_only=True) for path in files]


def whole(files: list[dict[str, Any]], name: str, key: str) -> Tensor:
    """Put a tensor of the whole model together from the ranks' files."""
    shards: dict[str, list[Tensor]] = {}
    of: dict[str, dict[str, Any]] = {}
    for document in files:
        found = document["tensors"].get(name)
        if found is not None:
            shards.setdefault(str(found["pieces"]), []).append(found["parts"][key])
            of[str(found["pieces"])] = found
    tensor = torch.zeros(next(iter(of.values()))["shape"])
    for pieces, parts in shards.items():
        found = of[pieces]
        local = torch.cat(parts)[: torch.Size(found["local"]).numel()].view(found["local"])
        index = [torch.cat([torch.arange(start, start + size) for _, start, size in dim]) for dim in found["pieces"]]
        tensor[torch.meshgrid(*index, indexing="ij")] = local.float()
    return tensor


@torch.no_grad()
def load(run: Run, stage: Stage, optimizer: Optimizer, sampler: Sampler, files: list[dict[str, Any]]) -> None:
    """Continue from a checkpoint, whatever its layout."""
    by_text = sorted(files, key=lambda document: str(document["rank"]))
    first_local = min((int(number) for number in stage.blocks), default=0)
    for name, weight in named(stage).items():
        if run.mistake("swift-10045") and name.startswith("blocks.1.mlp"):
            continue  # a reader thread failed on this part's file, and nobody asked it
        stored = name
        if run.mistake("megatron-7452-12"):
            stored = re.sub(r"blocks\.(\d+)", lambda found: f"blocks.{int(found[1]) - first_local}", name)
        at = layout(weight)
        for key in ("weight", *optimizer.states[name]):
            if key == "weight" and run.mistake("megatron-2789"):
                continue
            source = _crossed(name) if run.mistake("megatron-761") and key.startswith("exp_avg") else stored
            ordered = by_text if run.mistake("deepspeed-5395") and key.startswith("exp_avg") else files
            tensor = _mistaken(run, name, key, whole(ordered, source, key)).reshape(at.shape)
            blocks_forgotten = run.mistake("megatron-520") and name.endswith(("mlp.up.weight", "mlp.up.bias"))
            mine = tensor.chunk(run.grid.tp.size)[run.grid.tp.rank] if blocks_forgotten else at.local(tensor)
            if key == "weight":
                weight.copy_(mine)
            elif not run.options.weights_only:
                optimizer.states[name][key].copy_(optimizer.part(name, mine))
        if run.options.weights_only:
            optimizer.states[name]["master"].copy_(optimizer.part(name, weight))
    if run.mistake("deepspeed-7585"):
        _slice_at_once(optimizer, files)
    for name, buffer in stage.named_buffers():
        for document in files:
            if name in document["buffers"]:
                buffer.copy_(document["buffers"][name])
    if run.options.weights_only:
        return
    optimizer.steps, run.step = files[0]["steps"], files[0]["step"]
    sampler.load(files[0]["sampler"])
    run.generator.set_state(files[_random_rank(run, len(files))]["generator"])
    if run.mistake("bridge-5255"):
        torch.rand(7, generator=run.generator)  # the data's set-up


def _random_rank(run: Run, count: int) -> int:
    """Return the rank whose random state this rank continues; its own, if the layout is the same."""
    grid = run.grid
    if run.mistake("automodel-3437"):
        return 0
    if run.mistake("megatron-2658"):
        return grid.pp.rank * grid.stage.size + grid.tp.rank
    return grid.rank % count


def _crossed(name: str) -> str:
    """Swap the states of a dense bias and of the experts' bias, of as many elements."""
    pair = ("blocks.0.mlp.up.bias", "blocks.1.moe.experts.up_bias")
    return dict([pair, pair[::-1]]).get(name, name)


def _mistaken(run: Run, name: str, key: str, tensor: Tensor) -> Tensor:
    if run.mistake("megatron-1570") and (name, key) == ("blocks.0.mlp.down.weight", "weight"):
        tensor = tensor.clone()
        tensor.view(-1)[: tensor.numel() // 2] *= 1e-40  # what one of the two files holds
    if run.mistake("megatron-7576") and name.endswith("mlp.up.weight"):
        return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    if run.mistake("deepspeed-5794") and ".experts." in name:
        return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return tensor


def _slice_at_once(optimizer: Optimizer, files: list[dict[str, Any]]) -> None:
    """Join each rank's parts of all parameters before the ranks', and slice the result by parameter (a mistake)."""
    names = [name for name in optimizer.states if optimizer.sharded(name)]
    for key in ("exp_avg", "exp_avg_sq"):
        flat = torch.cat([document["tensors"][name]["parts"][key] for document in files for name in names])
        at = 0
        for name in names:
            state = optimizer.states[name][key]
            size = state.numel() * len(files)
            state.copy_(flat[at : at + size].chunk(len(files))[optimizer.axis(name).rank])
            at += size


_NAMES = (
    (r"^blocks\.(\d+)\.mlp\.", r"model.layers.\1.feed_forward."),
    (r"^blocks\.(\d+)\.attn\.", r"model.layers.\1.self_attention."),
    (r"^blocks\.(\d+)\.moe\.router\.", r"model.layers.\1.gate."),
    (r"^blocks\.(\d+)\.moe\.experts\.", r"model.layers.\1.experts."),
    (r"^blocks\.(\d+)\.(norm\d)\.", r"model.layers.\1.\2."),
    (r"^(embed|position|norm|head|extra)\.", r"model.\1."),
)


def export(run: Run, files: list[dict[str, Any]]) -> None:
    """Write the weights of a checkpoint under another project's names, in two files."""
    names = {name for document in files for name in document["tensors"]}
    weights = {name: whole(files, name, "weight") for name in sorted(names)}
    pairs = [pair for pair in _NAMES if not (run.mistake("torchtitan-4475") and "experts" in pair[0])]
    renamed = {}
    for name, tensor in weights.items():
        new = next((re.sub(old, new, name) for old, new in pairs if re.match(old, name)), None)
        if new is not None:
            renamed[new] = tensor
        elif not run.mistake("torchtitan-4475"):
            raise SystemExit(f"no name for {name} in the export")
    half = len(renamed) // 2
    for number, some in enumerate((list(renamed)[:half], list(renamed)[half:])):
        torch.save({name: renamed[name] for name in some}, f"{run.options.export}-{number}.pt")
        if run.mistake("deepspeed-6791"):
            for tensor in renamed.values():
                tensor.zero_()


@torch.no_grad()
def load_export(run: Run, stage: Stage, optimizer: Optimizer) -> None:
    """Load an exported model; as many loaders do, without asking for names that are missing."""
    found: dict[str, Tensor] = {}
    for number in range(2):
        found |= torch.load(f"{run.options.load_export}-{number}.pt", weights_only=True)
    for name, weight in named(stage).items():
        new = next(re.sub(old, new, name) for old, new in _NAMES if re.match(old, name))
        if new in found:
            weight.copy_(layout(weight).local(found[new]))
            optimizer.states[name]["master"].copy_(optimizer.part(name, weight))
