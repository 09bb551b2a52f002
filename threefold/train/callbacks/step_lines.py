"""Text of the lines about a run's steps: the log's, and the terminal's shorter ones."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from threefold.files import format_bytes
from threefold.train.callbacks.base import clock
from threefold.train.callbacks.records import EvaluationRecord, MeanRates, StepRecord

_SAME: Final = 0.0005  # relative change of the loss that is not a change
_WORTH_SAYING: Final = 0.01  # share of a step that its ranks wait for each other, below which it is left out
_WORTH_A_LOOK: Final = 0.5  # share of a step that its ranks wait for each other, from which on it is coloured


def step_line(since: Sequence[StepRecord], ranks: int) -> str:
    """Format the line of the last of the steps `since` the previous line, with averages over them."""
    last, count = since[-1], len(since)
    seconds = sum(record.seconds for record in since)
    rate = sum(record.tokens_read for record in since) / seconds
    parts = [
        f"global step {last.step}, epoch: {last.epoch}, batch: {last.batch}, loss: {last.loss:.9f}",
        f"avg_reader_cost: {sum(record.reader_cost for record in since) / count:.5f} sec",
        f"avg_batch_cost: {seconds / count:.5f} sec, speed: {count / seconds:.2f} step/s",
        f"ips_total: {rate:.0f} {last.unit}/s, ips: {rate / ranks:.0f} {last.unit}/s, learning rate: {last.lr:.5e}",
    ]
    if last.loss_scale is not None:
        parts.append(f"loss scale: {last.loss_scale:g}")
    parts += [f"epoch of {name}: {epochs:.3g}" for name, epochs in last.corpus_epochs.items()]
    parts += [f"{name}: {mean:.9f}" for name, mean in last.terms.items()]
    rates = MeanRates.over(since)
    if (used := rates.last) is not None:
        parts += [f"tflops: {rates.teraflops:.4g}"] if rates.flops else []
        parts += [f"mfu: {rates.mfu:.1%}"] if rates.mfu else []
        parts.append(f"memory: {format_bytes(used.memory)}")
        parts.append(f"max_memory: {format_bytes(used.largest_memory)} (rank {used.largest_rank})")
        costs = {name: sum(record.phases.get(name, 0.0) for record in since) for name in ("forward_backward", "update")}
        costs["wait"] = sum(record.performance.waited for record in since if record.performance is not None)
        parts += [f"avg_{name}_cost: {total / count:.5f} sec" for name, total in costs.items()]
        parts.append(f"wall_clock: {used.wall_clock:.1f} sec")
    return ", ".join(parts)


class Part(NamedTuple):
    """Part of a running line; the text is empty if the run does not have it.

    A narrow terminal does without the parts of the largest `place` first, and always has those of 0. The style is as
    rich names it.
    """

    text: str
    place: int = 0
    style: str = ""


class RunningLines:
    """Lines of about 100 characters: `step 225/500  loss 5.4565 ↓  val 5.7829  lr 2.11e-03  4,275 tok/s  479 ms …`."""

    def __init__(self, steps: int) -> None:
        self.steps, self._loss, self._valid = steps, 0.0, ""

    def step(self, since: Sequence[StepRecord]) -> str:
        """Format the last of the steps since the previous line, with averages of speed and time over them."""
        before, self._loss = self._loss, since[-1].loss
        return self.of(since[-1].step, *(part.text for part in self.parts(since, before)))

    def evaluation(self, record: EvaluationRecord) -> str:
        self._valid = f"val {record.loss:.4f}"
        of_parts = [f"of {name} {loss:.4f}" for name, loss in record.corpus_losses.items()]
        of_parts += [f"{name} {mean:.4f}" for name, mean in record.terms.items()]
        return self.of(record.step, f"validation loss {record.loss:.4f}", *of_parts, f"{record.seconds:.1f} s")

    def of(self, step: int, *parts: str) -> str:
        """Format parts of a line about a step; empty ones are left out."""
        width = len(f"{self.steps:,}")
        return "  ".join([f"step {step:>{width},}/{self.steps:,}", *(part for part in parts if part)])

    def parts(self, since: Sequence[StepRecord], before: float) -> Iterator[Part]:
        """Yield the parts after the step, for a loss that was `before`; 0 if there was none."""
        last, seconds = since[-1], sum(record.seconds for record in since)
        change = (last.loss - before) / before if before else 0.0
        trend = " ↓" if change < -_SAME else " ↑" if change > _SAME else ""
        yield Part(f"loss {last.loss:.4f}{trend}", style="bold yellow" if change > _SAME else "bold green")
        for name, mean in last.terms.items():
            yield Part(f"{name} {mean:.4f}", 5)
        yield Part(self._valid, 1, "cyan")
        yield Part(f"lr {last.lr:.2e}", 4, "dim")
        yield Part(f"loss scale {last.loss_scale:,.0f}" if last.loss_scale is not None else "", 6, "dim")
        unit = "tok" if last.unit == "tokens" else last.unit
        yield Part(f"{sum(record.tokens_read for record in since) / seconds:,.0f} {unit}/s", 2)
        each = seconds / len(since)
        shown = f"{1000 * each:,.0f} ms" if each < 10 else f"{each:,.1f} s"
        waited = sum(record.performance.waited for record in since if record.performance is not None) / seconds
        waiting = f" ({waited:.0%} waiting)" if waited >= _WORTH_SAYING else ""
        yield Part(shown + waiting, 3, "yellow" if waited >= _WORTH_A_LOOK else "")
        rates = MeanRates.over(since)
        if rates.last is not None:
            yield Part(f"{rates.mfu:.1%} MFU" if rates.mfu else "", 7)
            yield Part(format_bytes(rates.last.largest_memory), 8)
        yield Part(f"epoch {last.epoch + 1}" if last.epoch else "", 9)
        if left := self.steps - last.step:
            yield Part(f"{clock(left * each)} left")
        elif rates.last is not None:
            yield Part(f"{clock(rates.last.wall_clock)} in all")
