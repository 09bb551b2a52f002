"""A row of the scoreboard: a real bug, the two runs that show it, and what is to be said of it."""

from dataclasses import dataclass
from typing import Any, Final

MEAN: Final = "from rank to rank|differs? between ranks|one share|part of"
"""What may be said where gradients were not added up."""
GRADIENTS: Final = ("gradient *",)
UPDATES: Final = ("update *",)
WEIGHTS: Final = ("initial weight *",)
ROUTER: Final = (
    "blocks.*.moe",
    "blocks.*.moe.router",
    "blocks.*.moe.router.weight",
    "*, which blocks.*.moe.router reads",
)
EXPERTS: Final = ("blocks.*.moe.experts.*",)
MIXTURE: Final = "--experts 4 --auxiliary 0.2"


@dataclass(frozen=True)
class Row:
    """A bug, the two runs that show it, and what is to be said of it.

    Attributes:
        key: value of `--mistake`.
        repository, thread: where it was.
        what: the mistake.
        model: options of both runs.
        layout: further options of the run with the mistake.
        right: patterns of the names of parameters, modules and numbers that lead to the mistake, of kind and name, or
            of the words for it.
        shape: pattern of its shape in words; empty if it has none.
        reference: further options of the other run; `{folder}` is a folder for checkpoints.
        prepare: options of a run before, which writes checkpoints to `{folder}`.
        mistaken: whether it is the run before that makes the mistake, too.
    """

    key: str
    repository: str
    thread: str
    what: str
    model: str
    layout: str
    right: tuple[str, ...]
    shape: str = ""
    reference: str = ""
    prepare: str = ""
    mistaken: bool = False

    @property
    def title(self) -> str:
        """The key; of a pair of runs without a mistake, its options."""
        return self.key or f"{self.model} {self.layout}".strip()


def resumed(layout: str) -> dict[str, Any]:
    """Compare a run that goes on from a checkpoint with the one that wrote it and went on unbroken."""
    return {"reference": f"{layout} --start-step 2 --save {{folder}}", "layout": f"{layout} --load {{folder}}"}
