"""RUN/loss.png: plot of the training and validation loss."""

from itertools import accumulate
from math import log
from pathlib import Path
from typing import Any

from threefold.output import replace_link
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say
from threefold.train.callbacks.metrics import FILE as METRICS_FILE
from threefold.train.callbacks.metrics_reading import read_metrics

FILE = "loss.png"
_TRAIN, _VALID, _GREY = "#3366aa", "#cc4422", "#777777"


class LossCurve(Callback):
    """Plot the loss of the whole run after its last step, including the part before it was resumed."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        vocab_size, title = run.config.model.vocab_size, f"Loss of {run.run_dir.name}"
        return cls(run.run_dir / FILE, run.run_dir / METRICS_FILE, vocab_size, title)

    def __init__(self, path: Path, metrics: Path, vocab_size: int, title: str) -> None:
        self.path, self.metrics, self.vocab_size, self.title = path, metrics, vocab_size, title

    def after_fit(self) -> None:
        # A failure of the plotting library must not fail a finished run.
        try:
            draw(replace_link(self.path), list(read_metrics(self.metrics)), self.vocab_size, self.title)
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

    Args:
        path: path of the PNG.
        metrics: objects of a metrics file.
        vocab_size: V; a uniform guess has the loss ln V.
        title: title of the plot.
    """
    # Not pyplot, which has global state and needs a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    steps = [line for line in metrics if line.get("loss") is not None]
    evaluations = [line for line in metrics if line.get("valid_loss") is not None]
    numbers, losses = [line["step"] for line in steps], [line["loss"] for line in steps]

    # Fixed margins: a layout engine measures every label first, which takes as long as drawing them.
    figure = Figure(figsize=(8, 5))
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.1, top=0.84 if steps else 0.92)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        axes.plot(numbers, losses, color=_TRAIN, alpha=0.3, linewidth=1, label="training, each step")
        span = len(losses) // 40 * 2 + 1
        if span > 1:
            label = f"training, mean over {span} steps"
            middle = numbers[span // 2 : len(numbers) - span // 2]
            axes.plot(middle, smoothed(losses, span), color=_TRAIN, linewidth=2, label=label)
    if evaluations:
        last = evaluations[-1]
        axes.plot(
            [line["step"] for line in evaluations],
            [line["valid_loss"] for line in evaluations],
            color=_VALID,
            linewidth=1.5,
            marker="o",
            markersize=4,
            clip_on=False,  # the last point is on the frame
            label=f"validation, {last['valid_loss']:.3f} at the end",
        )
    guess = log(vocab_size)
    axes.axhline(
        guess, color=_GREY, linewidth=1, linestyle="--", label=f"uniform guess, ln {vocab_size:,} = {guess:.2f}"
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, y=1.13 if steps else 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    if numbers:
        axes.set_xlim(0, numbers[-1])
        per_step = max(1, sum(line["tokens"] for line in steps if not line.get("skipped"))) / len(steps)
        upper = axes.secondary_xaxis("top", functions=(lambda x: x * per_step, lambda x: x / per_step))
        upper.xaxis.set_major_formatter(EngFormatter(sep=""))
        upper.set_xlabel("tokens trained on (counted for the loss)")
    figure.savefig(path, dpi=150)
