"""The engine of a verified layout, all of whose work goes in tiny pieces, and this rank's part of it."""

from typing import Final

from torch import Tensor

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh, SharedMemorySizes
from threefold.config import Config
from threefold.models.source import ModelSource
from threefold.parallel.parameter import offset
from threefold.parallel.settings import PieceSizes
from threefold.train.engine import Engine
from threefold.train.loss_scale import LossScale
from threefold.verify.compare import Held

PIECES: Final = PieceSizes(bucket_bytes=8 << 10, norm_elements=16, logits_at_once=1 << 5)
SHARED_MEMORY: Final = SharedMemorySizes(slot=4 << 10, sharing=2 << 10)
"""Sizes with which the tensors of a shrunk model have several pieces too, of full and of other lengths, so that a
mistake at the bound of a piece, or in all but the first, is no smaller than in the full model."""


def tiny_mesh(config: Config) -> Mesh:
    """The mesh of a config's layout, with tiny pieces in shared memory."""
    return Mesh(Layout.of(config.parallel), sizes=SHARED_MEMORY)


def tiny_engine(
    source: ModelSource, config: Config, mesh: Mesh, clip: float, loss_scale: LossScale | None = None
) -> Engine:
    """An engine with tiny pieces.

    Args:
        source: the model.
        config: of the layout.
        mesh: of this rank.
        clip: norm to which gradients are clipped; 0 for no clip.
        loss_scale: None for that of the config.
    """
    optimizer = config.optimizer.model_copy(update={"clip_grad_norm": clip})
    config = config.model_copy(update={"optimizer": optimizer})
    make_model, plan = source.load(config)
    return Engine(make_model, plan, mesh, config, loss=source.loss(config), loss_scale=loss_scale, pieces=PIECES)


def held_parts(engine: Engine) -> dict[str, Held]:
    """This rank's shard of each parameter of its stages, by name."""
    numbers = engine.parallelism.stages.held_by(engine.mesh.pp.index)
    stages: dict[str, int] = {}
    for number, stage in zip(numbers, engine.stages, strict=True):
        for name, _ in stage.named_parameters():
            stages.setdefault(engine.plan.whole_name(name), number)
    return {
        entry.name: Held(entry.name, stages[entry.name], offset(entry.parameter), tuple(entry.master.shape))
        for entry in engine.model.weights
    }


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """This rank's part of each weight, as it is updated."""
    return {weight.name: weight.master.detach() for weight in engine.model.weights}


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """This rank's part of each gradient."""
    return {entry.name: entry.gradient.detach() for entry in engine.optimizer.entries}
