"""`threefold coordinates`: sizes of activations by width, with and without µP (the coordinate check of its paper)."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typer import Option

from threefold.errors import UserError
from threefold.files import shown
from threefold.report.progress import Steps
from threefold.terminal import ConfigFile, Overrides, read_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from threefold.config import Config

OUTPUTS: Final = ("embedding", "attention", "feed-forward", "logits")
"""What is measured: outputs of the embedding, of each half of a block (a mean over the blocks), and the logits."""
_SCALED: Final = ("ffn_hidden_size", "head_dim", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size")
_SEQUENCES, _TOKENS = 8, 64
"""Largest batch: a few sequences of a few tokens show the same sizes as a whole one."""
_WIDEST: Final = 2**16


@dataclass(frozen=True)
class ActivationSizes:
    """Mean absolute values of activations in a few steps, at several widths of a model.

    Attributes:
        widths: values of `model.hidden_size`.
        base: `model.width_base` with µP.
        sizes: (whether with µP, width) → output → its size after 0, 1, … updates.
    """

    widths: tuple[int, ...]
    base: int
    sizes: dict[tuple[bool, int], dict[str, list[float]]]

    def growth(self, scaled: bool, output: str) -> float:
        """Return the size at the largest width in units of that at the smallest, after the last update."""
        first, last = (self.sizes[scaled, width][output][-1] for width in (self.widths[0], self.widths[-1]))
        return last / first

    def largest(self, scaled: bool) -> str:
        """Return the output whose size changes most with the width."""
        return max(OUTPUTS, key=lambda each: abs(self.growth(scaled, each) ** 0.5 - self.growth(scaled, each) ** -0.5))


def command(
    config: ConfigFile,
    widths: str = Option("64,128,256", metavar="N,N…", help="Values of model.hidden_size, each in turn."),
    steps: int = Option(5, min=1, max=1000, help="Updates of each model."),
    out: Path = Option(Path("coordinates.png"), help="The picture, .png or .svg."),
    overrides: Overrides = None,
    as_json: bool = Option(False, "--json", help="Print a JSON document, and progress on standard error."),
) -> None:
    """Train CONFIG's model for a few steps at several widths, with µP and without, and compare the activations.

    Heads keep their number; all other widths are scaled with model.hidden_size. The base of µP is model.width_base, or
    the smallest width. Each run is one process in fp32 at a constant optimizer.lr, without clipping, on at most 8
    sequences of 64 tokens. With µP, activations keep their size at any width, so that one learning rate suits all.

    Examples:
      threefold coordinates run.yaml --widths 64,128,256 --set optimizer.lr=0.01
    """
    from threefold.report.figures import require_picture

    given = read_config(config, overrides)
    numbers = parse_widths(widths)
    require_picture(out)
    with Steps("Training", 2 * len(numbers), lines=True) as bar:
        found = coordinates(given, numbers, steps, bar)
    draw(found, steps, out, given.model.architecture)
    if as_json:
        rows = [
            {"mup": scaled, "width": width, "mean_absolute": sizes} for (scaled, width), sizes in found.sizes.items()
        ]
        print(json.dumps({"width_base": found.base, "steps": steps, "runs": rows, "picture": str(out)}, indent=2))
    else:
        _print(found, given, steps, out)


def parse_widths(text: str) -> tuple[int, ...]:
    """Return the widths in `text`, ascending; raise a `UserError` unless they are two or more whole numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _WIDEST for word in words) or len(set(words)) < 2:
        raise UserError(
            f"--widths {shown(text)} must be two or more numbers from 1 to {_WIDEST:,}, such as 64,128,256."
        )
    return tuple(sorted({int(word) for word in words}))


def coordinates(given: "Config", widths: Sequence[int], steps: int, bar: Steps | None = None) -> ActivationSizes:
    """Train each model, in one process, and measure its outputs before each update and after the last."""
    base = given.model.width_base or widths[0]
    configs = {
        (scaled, width): at_width(given, width, base if scaled else 0) for scaled in (False, True) for width in widths
    }
    sizes = {}
    for number, ((scaled, width), config) in enumerate(configs.items()):
        if bar is not None:
            bar.tell(f"width {width}{' with µP' if scaled else ''}", number, len(configs))
        sizes[scaled, width] = _measured(given, config, steps)
    return ActivationSizes(tuple(widths), base, sizes)


def at_width(given: "Config", width: int, base: int) -> "Config":
    """Return the resolved config of the model at another width, with `model.width_base`, 0 for none.

    Raises a `UserError` if the settings do not go together at this width.
    """
    from threefold.config import resolve
    from threefold.config.loading import config_of
    from threefold.data.dataset import vocabulary
    from threefold.verify.layouts import UNKNOWN_VOCABULARY

    model = {key: value for key, value in given.model.settings().items() if key != "preset"}
    for key in _SCALED:
        if value := model.get(key):
            scaled = value * width / model["hidden_size"]
            if not scaled.is_integer():
                raise UserError(
                    f"{given.origin(f'model.{key}')}model.{key} is {value} at model.hidden_size "
                    f"{model['hidden_size']}, which at the width {width} would be {scaled:g}; use widths that are "
                    f"multiples or parts of {model['hidden_size']}."
                )
            model[key] = int(scaled)
    model |= {"hidden_size": width, "width_base": base, "vocab_size": given.model.vocab_size or vocabulary(given)}
    model["vocab_size"] = model["vocab_size"] or UNKNOWN_VOCABULARY
    data = {key: value for key, value in given.data.settings().items() if key != "skip_steps"}
    data["sequence_length"] = min(_TOKENS, given.data.sequence_length or _TOKENS)
    optimizer = {**given.optimizer.settings(), "decay": "constant", "warmup_steps": 0, "clip_grad_norm": 0.0}
    for key in ("min_lr", "decay_steps", "stable_steps"):
        optimizer.pop(key, None)
    train = {"seed": given.train.seed, "global_batch_size": _SEQUENCES, "device": "cpu"}
    sections = {"model": model, "data": data, "train": train, "optimizer": optimizer, "precision": {"dtype": "fp32"}}
    return resolve(config_of(sections), vocab_size=1)


def _measured(given: "Config", config: "Config", steps: int) -> dict[str, list[float]]:
    from functools import partial

    from threefold.data.loader import BatchSlice
    from threefold.models.family import make_model, model_plan
    from threefold.verify.reference import OneProcess
    from threefold.verify.verifier import choose_batches

    plan = model_plan(config.model, config.data.sequence_length)
    run = OneProcess(partial(make_model, config.model), plan, config)
    seen: dict[str, list[float]] = defaultdict(list)
    for name, module in run.model.named_modules():
        if output := _output_of(name):
            module.register_forward_hook(partial(_note, seen[output]))
    batches, found = choose_batches(given), {output: list[float]() for output in OUTPUTS}
    for step in range(steps + 1):
        run.step(batches.read(config, step, BatchSlice(_SEQUENCES, 0, 1)), step)
        for output, values in seen.items():
            found[output].append(sum(values) / len(values))
            values.clear()
    return found


def _output_of(name: str) -> str:
    """Return which of `OUTPUTS` a module has; empty for none."""
    first, *rest = name.split(".")
    if first == "blocks" and len(rest) == 2:
        return {"attn": "attention", "mlp": "feed-forward"}.get(rest[1], "")
    return {"embed": "embedding", "head.output": "logits"}.get(name, "")


def _note(values: list[float], module: "nn.Module", given: Any, output: "Tensor") -> None:
    values.append(output.detach().abs().mean().item())


def _print(found: ActivationSizes, given: "Config", steps: int, out: Path) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, soft_wrap=True)
    optimizer = given.optimizer
    console.print(
        f"\nMean |activation|, without a unit, after {steps} updates by {optimizer.name} with the learning rate "
        f"{optimizer.lr:g}, by model.hidden_size:\n"
    )
    widths = [Column(f"{width:,}", justify="right") for width in found.widths]
    table = Table(Column("output"), *widths, Column("growth", justify="right"), box=None, header_style="bold")
    for scaled in (False, True):
        table.add_row(f"with µP, width_base {found.base}" if scaled else "without µP", style="dim")
        for output in OUTPUTS:
            sizes = (f"{found.sizes[scaled, width][output][-1]:.3g}" for width in found.widths)
            table.add_row(f"  {output}", *sizes, f"× {found.growth(scaled, output):.2f}")
    console.print(table)
    most = {scaled: found.largest(scaled) for scaled in (True, False)}
    with_, without = (f"{output} × {found.growth(scaled, output):.2f}" for scaled, output in most.items())
    console.print(f"\nThe largest change with the width: {with_} with µP, {without} without.\npicture  {out}")


def draw(found: ActivationSizes, steps: int, path: Path, title: str) -> None:
    """Draw the sizes by width, a line for each number of updates, with and without µP."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    from threefold.report import figures

    figure, axes = figures.new_figure(
        4.6,
        f"{title}: activations by width, with and without µP",
        f"Mean |activation|, without a unit, after 0 to {steps} updates. Flat: one learning rate suits all widths.",
    )
    axes.remove()
    panels = figure.subplots(2, len(OUTPUTS), sharex=True, sharey="col")
    for row, scaled in enumerate((False, True)):
        color = figures.BLUE if scaled else figures.ORANGE
        for column, output in enumerate(OUTPUTS):
            panel = panels[row][column]
            for step in range(steps + 1):
                values = [found.sizes[scaled, width][output][step] for width in found.widths]
                shade = figures.lighter(color, 0.75 * (1 - step / steps))
                label = f"{step} updates" if step in (0, steps) else None
                panel.plot(found.widths, values, color=shade, marker="o", markersize=3, linewidth=1.6, label=label)
            panel.set(xscale="log", yscale="log")
            panel.xaxis.set_major_locator(FixedLocator(list(found.widths)))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.tick_params(labelsize=figures.SMALL_SIZE, colors=figures.INK, length=3, which="both")
            panel.grid(color=figures.FAINT, which="both")
            panel.set_axisbelow(True)
            for side in panel.spines.values():
                side.set_color(figures.LINE)
            if row == 0:
                panel.set_title(output, fontsize=figures.TEXT_SIZE, color=figures.INK)
            else:
                panel.set_xlabel("model.hidden_size", fontsize=figures.SMALL_SIZE, color=figures.INK)
        named = f"with µP (base {found.base})" if scaled else "without µP"
        panels[row][0].set_ylabel(f"{named}\nmean |activation|", fontsize=figures.TEXT_SIZE, color=figures.INK)
        panels[row][0].legend(frameon=False, fontsize=figures.SMALL_SIZE, loc="lower left")
    for panel in panels[0]:  # at least a decade, so that what is nearly flat looks so
        low, high = panel.get_ylim()
        wider = max(1.0, (10 * low / high) ** 0.5)
        panel.set_ylim(low / wider, high * wider)
    figures.save(figure, path)
