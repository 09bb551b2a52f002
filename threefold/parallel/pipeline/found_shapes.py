"""Shapes of the activations between stages, found once: a micro-batch goes through the stages, and tells them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.models.own_batch import inputs_from
from threefold.parallel.pipeline.micro_batches import StepSamples
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage import Stage


class TensorShape(NamedTuple):
    """What the receiver of a tensor has to know of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorShape":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def on(self, device: torch.device | str) -> Tensor:
        """An empty tensor like it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


def find_activations(
    stages: Sequence[Stage], placement: StageMap, mesh: Mesh, micro_batch: StepSamples
) -> dict[int, tuple[Tensor, ...]]:
    """What each stage gives the next one, on the meta device, for the stages of this rank and those before them.

    The micro-batch goes through all stages but the last, forward alone. Collective over the pipeline, and over whatever
    the layers communicate with.

    Args:
        stages: this rank's, in the pipeline's order.
        placement: which ranks hold the other stages.
        mesh: of this rank.
        micro_batch: real samples, so that layers may compute with their values.

    Returns:
        number of a stage → its activations.
    """
    found: dict[int, tuple[Tensor, ...]] = {}
    last: tuple[Tensor, ...] = ()
    rank = mesh.pp.index
    for number, stage in zip(placement.held_by(rank), stages, strict=True):
        received = None
        if number:
            source = placement.ranks[number - 1]
            received = last if source == rank else _receive(mesh, source)
            found[number - 1] = _on_meta(received)
        if stage.gives_loss:
            break
        with torch.enable_grad():
            outputs = inputs_from(micro_batch.through(stage, received), stage.layer_names[-1]).args
        found[number] = _on_meta(outputs)
        # As the next stage gets it: apart from the graph of this one.
        last = tuple(each.detach().requires_grad_(each.requires_grad) for each in outputs)
        receiver = placement.ranks[number + 1]
        if receiver != rank:
            _send(mesh, receiver, last)
    return found


def _on_meta(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(TensorShape.of(each).on("meta") for each in tensors)


def _send(mesh: Mesh, to: int, tensors: Sequence[Tensor]) -> None:
    shapes = [tuple(TensorShape.of(each)) for each in tensors]
    with mesh.pp.waiting("send"):
        dist.send_object_list([shapes], mesh.pp.ranks[to], mesh.pp.group, mesh.device)
    for tensor in tensors:
        mesh.pp.send(tensor.detach(), to)


def _receive(mesh: Mesh, source: int) -> tuple[Tensor, ...]:
    arrived: list[Any] = [None]
    with mesh.pp.waiting("receive"):
        dist.recv_object_list(arrived, mesh.pp.ranks[source], mesh.pp.group, mesh.device)
    received = []
    for shape in arrived[0]:
        described = TensorShape(*shape)
        tensor = mesh.pp.receive_(described._replace(requires_grad=False).on(mesh.device), source)
        received.append(tensor.requires_grad_(described.requires_grad))
    return tuple(received)
