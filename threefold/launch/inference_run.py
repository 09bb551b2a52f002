"""Launch generation and evaluation: check before the ranks start, then load the model on each rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from threefold.comm.layout import Layout
from threefold.inference.model import Trained
from threefold.launch.device import choose_device
from threefold.launch.environment import find_launched_rank
from threefold.launch.launcher import run
from threefold.launch.worker import Device, RankInfo

RankFunction = Callable[..., object]
"""Function of an importable module, called as `work(model, *args)` on every rank."""


@dataclass(frozen=True)
class InferenceRun:
    """A trained model, and the ranks to run it on.

    Attributes:
        trained: the checkpoint.
    """

    trained: Trained
    layout: Layout
    dtype: str
    device: Device

    @classmethod
    def prepare(
        cls,
        run_dir: Path,
        layout: Layout,
        dtype: str,
        device: Literal["auto", "cpu", "cuda"],
        model: str | None = None,
        trust_code: bool = False,
    ) -> Self:
        """Check everything before a rank starts.

        Args:
            run_dir: run folder.
            layout: layout of the ranks.
            dtype: dtype of weights and computation.
            device: device of the ranks; "auto" uses GPUs if there is one per rank.
            model, trust_code: passed to `Trained.find`.

        Raises:
            UserError: `run_dir` has no checkpoint or no tokenizer, the model does not support the layout, the launcher
                started another number of ranks, or there are fewer GPUs than ranks.
        """
        trained = Trained.find(run_dir, model=model, trust_code=trust_code)
        trained.check(layout)
        trained.tokenizer()
        launched = find_launched_rank()
        if launched:
            layout.require_world(launched.world_size, launched.variables)
        local_world_size = launched.local_world_size if launched else layout.world_size
        return cls(trained, layout, dtype, choose_device(device, dtype, local_world_size))

    def start(self, work: RankFunction, *args: Any) -> None:
        """Load the model and call `work(model, *args)` on every rank; return when all have ended.

        A single rank runs in this process; several are processes of this host, or those of a launcher.

        Raises:
            UserError: a rank raised it.
            RankFailed: a rank failed; all have been ended.
        """
        if self.layout.world_size == 1 and find_launched_rank() is None:
            from threefold.comm.mesh import Mesh

            model = self.trained.load(Mesh.alone(self.device), self.dtype)
            with model.few_threads():
                work(model, *args)
        else:
            run(_work, (self, work, args), self.layout.world_size, device=self.device)


def _work(info: RankInfo, inference: InferenceRun, work: RankFunction, args: tuple[Any, ...]) -> None:
    """Load this rank's shards of the model, and call `work` with it."""
    import torch

    from threefold.comm.mesh import Mesh

    on_gpu = inference.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    work(inference.trained.load(Mesh(inference.layout, device), inference.dtype), *args)
