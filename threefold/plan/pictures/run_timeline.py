"""The timeline of a real run: what each pipeline stage did when, from the spans that `train --profile` writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, Final, NamedTuple

from threefold.plan.pictures.timeline import OF_ACTION, TimeSpan, draw_timeline

_OTHERS: Final = {"gradient sum": "communication", "update": "optimizer", "data": "other"}
"""Names of spans that are no action of the pipeline → their kinds in the picture; others are not drawn."""
NAME: Final = "timeline"


class MeasuredStep(NamedTuple):
    """A step of a run.

    Attributes:
        number: 1 for the first.
        seconds: from the beginning of its first span to the end of its last, over all stages.
        bubble: as of a simulated schedule: of the longest time from a stage's first action to its last, the part in
            which a stage waits, the mean over the stages.
        spans: times in ms.
    """

    number: int
    seconds: float
    bubble: float
    spans: list[TimeSpan]


def draw_run_timeline(path: Path) -> list[Path]:
    """Draw the step of median length beside the file of spans.

    Args:
        path: of the file.

    Returns:
        the PNG and the SVG; nothing where no step is whole.

    Raises:
        UserError: a picture cannot be written.
        OSError: the file cannot be read.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    steps = measured_steps(found["ranks"])
    if not steps:
        return []
    chosen = next(step for step in steps if step.seconds == median_low(each.seconds for each in steps))
    title = (  # the legend is beside the second line
        f"Step {chosen.number} of a run, {found['layout']}: {1000 * chosen.seconds:,.0f} ms\n"
        f"measured bubble {chosen.bubble:.1%}"
    )
    pictures = [path.with_name(f"{NAME}{suffix}") for suffix in (".png", ".svg")]
    for picture in pictures:
        draw_timeline(picture, chosen.spans, title, called="pp rank")
    return pictures


def measured_steps(ranks: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """The steps of which every stage's rank has actions, in order.

    Args:
        ranks: for each rank `pp_rank` and `spans`, with the fields of `Span`.
    """
    numbers = [{span["step"] for span in rank["spans"] if span["kind"]} for rank in ranks]
    return [_step(ranks, number) for number in sorted(set.intersection(*numbers))] if numbers else []


def _step(ranks: Sequence[Mapping[str, Any]], number: int) -> MeasuredStep:
    drawn: list[TimeSpan] = []
    busy, spent = list[float](), list[float]()
    for rank in ranks:
        spans = [span for span in rank["spans"] if span["step"] == number]
        actions = [span for span in spans if span["kind"]]
        busy.append(sum(span["end"] - span["start"] for span in actions))
        spent.append(max(span["end"] for span in actions) - min(span["start"] for span in actions))
        chunk = {stage: place for place, stage in enumerate(sorted({span["stage"] for span in actions}))}
        for span in spans:
            kind = OF_ACTION.get(span["kind"]) or _OTHERS.get(span["name"])
            if kind is not None:
                label = str(span["micro_batch"]) if span["kind"] else ""
                times = 1000 * span["start"], 1000 * span["end"]
                drawn.append(TimeSpan(rank["pp_rank"], kind, label, *times, chunk.get(span["stage"], 0)))
    longest = max(spent)
    seconds = (max(span.end for span in drawn) - min(span.start for span in drawn)) / 1000
    return MeasuredStep(number, seconds, 1 - sum(busy) / (longest * len(busy)), drawn)
