"""Memory of one step of a run by cause, measured on each stage's first rank, beside the planner's estimate."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.errors import UserError
from threefold.files import format_bytes
from threefold.foreign import nofollow_file, write_nofollow
from threefold.planner.dry_step import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS, EngineMemory, StorageTracker
from threefold.planner.pictures import draw_measured_memory
from threefold.planner.stage_memory import stage_memory
from threefold.terminal import print_table
from threefold.torch_private.fake import tree_leaves
from threefold.train.step import Engine

MEMORY_FILE: Final = "memory.json"


class ActivityMemory(NamedTuple):
    """Largest memory of a rank during one of its activities, in bytes by cause.

    The name is that of the activity, such as `0B3` for the backward pass of micro-batch 3 on stage 0, or `update`.
    """

    name: str
    causes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.causes.values())


class RunStorages(StorageTracker):
    """Storages of tensors made within the block, in a run that has made others before: data, and memory of the host
    that its ranks share."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                self.overlook(each)
        return super().__torch_dispatch__(func, types, args, kwargs)


class MemoryRecorder:
    """Recorder of the memory of one step, in parts by the rank's activities; counting slows that step."""

    def __init__(self) -> None:
        self._block = ExitStack()
        self._memory: EngineMemory | None = None
        self._name = ""
        self._moments: list[ActivityMemory] = []

    def begin(self, engine: Engine) -> None:
        self._memory = self._block.enter_context(EngineMemory(engine, RunStorages()))
        self._name = "start"

    def activity(self, name: str) -> None:
        """Begin an activity, which ends the one before."""
        if self._memory is None:
            return
        if name == "update":
            self._memory.gradients_made()
        self._moments.append(ActivityMemory(self._name, self._memory.causes))
        self._memory.begin()
        self._name = name

    def end(self) -> list[ActivityMemory]:
        """Stop, and return the moments in order; without effect if nothing is recorded."""
        self.activity("")
        self._memory = None
        self._block.close()
        moments, self._moments = self._moments, []
        return moments


def report(
    folder: Path, config: Config, step: int, stages: Sequence[tuple[int, Sequence[ActivityMemory]]]
) -> tuple[Path, list[tuple[str, ...]]]:
    """Write the memory of each stage to a file, draw it, and return the picture and the rows of `print_memory`.

    Args:
        stages: pp coordinate and moments of one rank of each.
    """
    device, layout = config.train.device, Layout.from_config(config.parallel)
    try:
        estimates = [stage.by_dry_run for stage in stage_memory(config, device)]
    except UserError:  # a model without formulas
        estimates = []
    peaks = [max(moments, key=lambda moment: moment.total) for _, moments in stages]
    held = [
        {
            "pp_rank": place,
            "peak": {"at": peak.name, **peak.causes},
            "estimate": estimates[place] if estimates else None,
            "moments": [{"at": moment.name, **moment.causes} for moment in moments],
        }
        for (place, moments), peak in zip(stages, peaks, strict=True)
    ]
    content: dict[str, Any] = {"layout": str(layout), "device": device, "step": step, "unit": "bytes", "ranks": held}
    write_nofollow(folder / MEMORY_FILE, json.dumps(content) + "\n")
    title = f"{config.model.title} in {layout}: memory at the peak of step {step}"
    picture = folder / "memory.png"
    draw_measured_memory(nofollow_file(picture), [peak.causes for peak in peaks], estimates, title)
    rows = []
    for (place, _), peak in zip(stages, peaks, strict=True):
        expected = format_bytes(sum(estimates[place].values())) if estimates else "not known"
        causes = (format_bytes(nbytes) for nbytes in peak.causes.values())
        rows.append((str(place), peak.name, *causes, format_bytes(peak.total), expected))
    return picture, rows


def print_memory(rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table of the peaks of the pipeline ranks."""
    print_table(("pp rank", "peak at", WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, "together", "estimate"), rows)
