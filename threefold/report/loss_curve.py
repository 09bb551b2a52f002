"""RUN/loss.png: plot of the training and validation loss."""

from itertools import accumulate
from math import log
from pathlib import Path
from typing import Any

from threefold.comm.layout import Layout
from threefold.foreign import nofollow_file
from threefold.report.door import CURVE_FILE, METRICS_FILE
from threefold.report.figures import BLUE, DPI, FAINT, GREY, ORANGE, TEXT_SIZE, new_figure
from threefold.report.metrics import read_metrics
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say


class LossCurve(Callback):
    """Plot the loss of the whole run after its last step, including the part before it was resumed."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        model, layout = run.config.model, Layout.from_config(run.config.parallel)
        title = f"{model.title} in {layout}: loss of {run.run_dir.name}"
        return cls(run.run_dir / CURVE_FILE, run.run_dir / METRICS_FILE, model.vocab_size, title)

    def __init__(self, path: Path, metrics: Path, vocab_size: int, title: str) -> None:
        self.path, self.metrics, self.vocab_size, self.title = path, metrics, vocab_size, title

    def after_fit(self) -> None:
        # A failure of the plotting library must not fail a finished run.
        try:
            draw(nofollow_file(self.path), list(read_metrics(self.metrics)), self.vocab_size, self.title)
        except Exception as error:
            say(f"Warning: {self.path} cannot be drawn ({reason_of(error)}).")


def smoothed(values: list[float], span: int) -> list[float]:
    """Return the centered moving average over `span` values, an odd number.

    The first and last `span // 2` values have none: a mean over fewer would follow single steps at the ends of the
    curve.
    """
    sums = [0.0, *accumulate(values)]
    return [(sums[place + span] - sums[place]) / span for place in range(len(values) - span + 1)]


def draw(path: Path, metrics: list[dict[str, Any]], vocab_size: int, title: str) -> None:
    """Plot the losses over the steps, with the tokens trained on (counted for the loss) on the upper axis.

    A uniform guess among `vocab_size` tokens has the loss ln V.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    steps = [line for line in metrics if line.get("loss") is not None]
    evaluations = [line for line in metrics if line.get("valid_loss") is not None]
    numbers, losses = [line["step"] for line in steps], [line["loss"] for line in steps]
    span = len(losses) // 40 * 2 + 1
    means = smoothed(losses, span)
    results = [f"validation loss {evaluations[-1]['valid_loss']:.3f}"] if evaluations else []
    results += [f"training loss {means[-1]:.3f}" + (f" (mean over {span} steps)" if span > 1 else "")] if steps else []
    at_end = f"After {numbers[-1]:,} steps: {', '.join(results)}." if numbers else ""

    figure, axes = new_figure(4.4, title, at_end)
    # A fixed place: a layout engine measures every label first, which takes as long as drawing them.
    figure.set_layout_engine("none")
    axes.set_position((0.075, 0.1, 0.9, 0.7 if steps else 0.79))
    if steps:
        axes.plot(numbers, losses, color=BLUE, alpha=0.35, linewidth=0.8, label="training, each step")
        if span > 1:
            middle = numbers[span // 2 : len(numbers) - span // 2]
            axes.plot(middle, means, color=BLUE, linewidth=2, label=f"training, mean over {span} steps")
    if evaluations:
        at, valid = [line["step"] for line in evaluations], [line["valid_loss"] for line in evaluations]
        style: dict[str, Any] = {"marker": "o", "markersize": 4.5, "clip_on": False}  # the last point is on the frame
        axes.plot(at, valid, color=ORANGE, linewidth=1.8, label="validation", **style)
    guess = log(vocab_size)
    label = f"uniform guess, ln {vocab_size:,} = {guess:.2f}"
    axes.axhline(guess, color=GREY, linewidth=1, linestyle="--", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=FAINT)
    axes.legend(frameon=False, fontsize=TEXT_SIZE)
    if numbers:
        axes.set_xlim(0, numbers[-1])
        per_step = max(1, sum(line["tokens"] for line in steps if not line.get("skipped"))) / len(steps)
        upper = axes.secondary_xaxis("top", functions=(lambda x: x * per_step, lambda x: x / per_step))
        upper.xaxis.set_major_formatter(EngFormatter(sep=""))
        upper.tick_params(labelsize=TEXT_SIZE, colors=GREY, length=3)
        upper.spines["top"].set_color(FAINT)
        upper.set_xlabel("tokens trained on (counted for the loss)", fontsize=TEXT_SIZE, color=GREY)
    figure.savefig(path, dpi=DPI)
