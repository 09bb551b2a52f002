"""A trained model on its ranks: processes of this host, those of a launcher, or this process alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from threefold.comm.layout import Layout
from threefold.launch.device import choose_device
from threefold.launch.environment import find_launched_rank
from threefold.launch.launcher import run
from threefold.launch.worker import Device, RankInfo, Worker

if TYPE_CHECKING:
    from threefold.inference.model import Trained


@dataclass(frozen=True)
class InferenceRun:
    """A trained model from a checkpoint, and the ranks to run it on."""

    trained: "Trained"
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
        average: bool = False,
        step: str | None = None,
    ) -> Self:
        """Check everything before a rank starts; the device "auto" uses GPUs if there is one per rank."""
        from threefold.inference.model import Trained  # imports torch, as loading does

        trained = Trained.find(run_dir, model=model, trust_code=trust_code, average=average, step=step)
        trained.check(layout)
        trained.tokenizer()
        launched = find_launched_rank()
        if launched:
            layout.require_world(launched.world_size, launched.variables)
        local_world_size = launched.local_world_size if launched else layout.world_size
        return cls(trained, layout, dtype, choose_device(device, dtype, local_world_size))

    def start(self, work: Worker, *args: Any) -> None:
        """Load the model and call `work(model, *args)` on every rank; return when all have ended.

        A single rank runs in this process; several are processes of this host, or those of a launcher. `work` is a
        function of an importable module.
        """
        if self.layout.world_size == 1 and find_launched_rank() is None:
            from threefold.comm.mesh import Mesh

            model = self.trained.load(Mesh.alone(self.device), self.dtype)
            with model.few_threads():
                work(model, *args)
        else:
            run(_infer, (self, work, args), self.layout.world_size, device=self.device)


def _infer(info: RankInfo, inference: InferenceRun, work: Worker, args: tuple[Any, ...]) -> None:
    import torch

    from threefold.comm.mesh import Mesh

    on_gpu = inference.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    work(inference.trained.load(Mesh(inference.layout, device), inference.dtype), *args)
