"""Plot the losses of a small Llama and a GPT-2 of the same size over the first 200 steps on real English.

    python benchmarks/families.py [FOLDER]

Only the architecture differs: text (`threefold data sample`), tokens, sample order, learning rate and seed are equal.
Takes some minutes on two cores; existing results in FOLDER are reused.
"""

import subprocess
import sys
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from threefold.config import Config, resolve
from threefold.models.family import make_model
from threefold.report.door import METRICS_FILE as FILE
from threefold.report.figures import BLUE, FAINT, GREY, ORANGE, TEXT_SIZE, new_figure, save
from threefold.report.loss_curve import smoothed
from threefold.report.metrics import read_metrics

PICTURE = Path(__file__).parents[1] / "docs" / "models" / "llama-and-gpt.png"
FOLDER = Path("families")
VOCAB, STEPS, SEEDS, SPAN = 4096, 200, (1,), 9  # further seeds show the differences between two runs
SHAPE = {"num_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "tie_embeddings": True}
COMMON: dict[str, dict[str, Any]] = {
    "data": {"sequence_length": 64, "split": "90,10"},
    "train": {"max_steps": STEPS, "global_batch_size": 16, "eval_every": 50, "eval_batches": 4, "device": "cpu"},
    "optimizer": {"lr": 3e-3},
    "log": {"every": 50},
}


class Family(NamedTuple):
    """Name, architecture and plot colour of one of the two models."""

    name: str
    architecture: str
    color: str


FAMILIES = (Family("like GPT-2", "gpt", BLUE), Family("like Llama", "llama", ORANGE))


def config(family: Family, tokens: Path, seed: int) -> Config:
    given = {**COMMON, "model": {**SHAPE, "architecture": family.architecture}}
    given["data"] = {**COMMON["data"], "path": str(tokens)}
    given["train"] = {**COMMON["train"], "seed": seed}
    return resolve(Config.model_validate(given), VOCAB)


def parameters(settings: Config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(settings.model).parameters())


def threefold(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "threefold", *map(str, arguments)], check=True)


def trained(folder: Path, family: Family, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of one run, training it if they do not exist yet."""
    run = folder / f"{family.architecture}-{seed}"
    settings = folder / f"{run.name}.yaml"
    settings.write_text(config(family, folder / "tokens", seed).to_yaml(), encoding="utf-8")
    if not (run / "loss.png").exists():
        threefold("train", settings, "--run-dir", run)
    return list(read_metrics(run / FILE))


def validation(runs: list[list[dict[str, Any]]]) -> dict[int, list[float]]:
    """Return the validation losses of all runs by step."""
    found: dict[int, list[float]] = {}
    for line in (line for run in runs for line in run if "valid_loss" in line):
        found.setdefault(line["step"], []).append(line["valid_loss"])
    return found


def draw(curves: dict[Family, list[list[dict[str, Any]]]], sizes: dict[Family, int]) -> None:
    shape = f"{SHAPE['num_layers']} layers of width {SHAPE['hidden_size']}, one process"
    seeds = f"Mean of {len(SEEDS)} seeds. " if len(SEEDS) > 1 else ""
    ends = {family: mean(validation(runs)[STEPS]) for family, runs in curves.items()}
    results = " and ".join(f"{ends[family]:.3f} {family.name}" for family in curves)
    figure, axes = new_figure(
        4.4,
        f"GPT-2 and Llama on the same text, tokens and order: {shape}",
        f"{seeds}Validation loss after {STEPS} steps: {results}.",
    )
    for family, runs in curves.items():
        for number, run in enumerate(runs):
            steps = [line for line in run if line.get("loss") is not None]
            middle = [line["step"] for line in steps][SPAN // 2 : len(steps) - SPAN // 2]
            label = "" if number else f"{family.name}: training, mean over {SPAN} steps"
            losses = smoothed([line["loss"] for line in steps], SPAN)
            axes.plot(middle, losses, color=family.color, alpha=0.5, linewidth=1.2, label=label)
        held = {step: mean(losses) for step, losses in validation(runs).items()}
        style: dict[str, Any] = {"color": family.color, "linewidth": 2, "marker": "o", "clip_on": False}
        label = f"{family.name}: validation, {sizes[family] / 1e6:.2f} M parameters"
        axes.plot(list(held), list(held.values()), label=label, **style)
    guess = log(VOCAB)
    axes.axhline(guess, color=GREY, linewidth=1, linestyle="--", label=f"uniform guess, ln {VOCAB:,} = {guess:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(0, STEPS)
    axes.grid(color=FAINT)
    axes.legend(frameon=False, fontsize=TEXT_SIZE, loc="upper right", bbox_to_anchor=(1, 0.9))
    PICTURE.parent.mkdir(exist_ok=True)
    save(figure, PICTURE)


def main(folder: Path) -> None:
    if not (folder / "text").exists():
        threefold("data", "sample", folder / "text")
    if not (folder / "tokens").exists():
        threefold("data", "prepare", folder / "text", "--out", folder / "tokens", "--vocab-size", str(VOCAB))
    sizes = {family: parameters(config(family, folder / "tokens", 0)) for family in FAMILIES}
    assert all(abs(one / other - 1) < 0.02 for one, other in pairwise(sizes.values())), sizes
    curves: dict[Family, list[list[dict[str, Any]]]] = {family: [] for family in FAMILIES}
    for seed in SEEDS:
        for family in FAMILIES:
            curves[family].append(trained(folder, family, seed))
    draw(curves, sizes)
    for family, runs in curves.items():
        print(f"{family.name}, {sizes[family]:,} parameters; validation loss of seeds {SEEDS}:")
        for step, losses in validation(runs).items():
            print(f"  step {step:3}: {mean(losses):.3f}  ({', '.join(f'{loss:.3f}' for loss in losses)})")
    print(f"Drawn in {PICTURE}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
