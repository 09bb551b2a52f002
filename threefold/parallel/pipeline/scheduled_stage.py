"""A pipeline stage as torch's schedules run it: its receive buffers, what it sends, and when it computes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from threefold.comm.mesh import Mesh
from threefold.config.schedule_actions import Action
from threefold.models.layers.decoder import SampleInfo
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage import Stage
from threefold.torch_private.pipelining import BufferedPipelineStage, RecvInfo

DeferredWeights = Callable[[], Callable[[], None]]


class TimedAction(NamedTuple):
    """When an action ran: seconds of `time.perf_counter`, on this rank."""

    action: Action
    start: float
    end: float


class _StageWithKeywords(nn.Module):
    """A stage as torch's schedules call it: they split tensors into micro-batches, so samples are keywords."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, labels: Tensor | None = None, **facts: Tensor) -> Tensor:
        out: Tensor = self.stage(x, labels, SampleInfo(**facts))
        return out


class Shapes(NamedTuple):
    """Shapes of what stages receive and send, declared on the meta device so that stages exchange no metadata.

    Attributes:
        tokens: input of the first stage.
        activation: input of every other stage, and output of every stage but the last.
        loss: output of the last stage.
    """

    tokens: Tensor
    activation: Tensor
    loss: Tensor


class ScheduledStage(BufferedPipelineStage):
    """One stage of a rank, as a `PipelineStage` of torch.

    In addition to torch's class, it has receive buffers for the micro-batches in flight only, counts its sends in the
    mesh's recorder, refuses activations of another shape than declared, and can log when it computed.

    Args:
        stage: the layers.
        number: its index in the pipeline.
        stages: which ranks hold the other stages.
        mesh: of this rank.
        shapes: of what stages receive and send.
        deferred: called after each backward pass; returns the function that computes its deferred weight gradients.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        stages: StageMap,
        mesh: Mesh,
        shapes: Shapes,
        deferred: DeferredWeights | None = None,
    ) -> None:
        super().__init__(
            _StageWithKeywords(stage),
            number,
            len(stages.ranks),
            mesh.device,
            input_args=shapes.tokens if number == 0 else shapes.activation,
            output_args=shapes.loss if stage.gives_loss else shapes.activation,
            group=mesh.pp.group,
            dw_builder=deferred,
        )
        self.log: list[TimedAction] | None = None
        self._recorder, self._declared = mesh.recorder, shapes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._timed("F", fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if not self.is_last:
            self._check(out)
        if not self.has_backward:
            _drop(self.args_recv_info[fwd_chunk_id])
            if self.is_last or self.is_on_this_rank(self.stage_index + 1):
                del self.fwd_cache[fwd_chunk_id]  # else it is still to be sent
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _drop(self.args_recv_info[bwd_chunk_id])
        _drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        with self._timed("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._sent(super().get_fwd_send_ops(fwd_chunk_id))
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            # Gloo sends the memory of a dense tensor in its order there, whatever its strides.
            op.tensor = op.tensor.contiguous()
            self._recorder.add("pp", "send", op.tensor)
        return ops

    def _check(self, out: Tensor) -> None:
        declared = self._declared.activation
        if (out.shape, out.dtype) != (declared.shape, declared.dtype):
            raise ValueError(
                f"stage {self.stage_index} gave activations {list(out.shape)} of {out.dtype}, "
                f"but {list(declared.shape)} of {declared.dtype} were declared"
            )

    def _make_buffers(self, infos: tuple[RecvInfo, ...]) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty_like(self._declared.activation, device=self.device, requires_grad=False)

    def receive_buffers_made(self, buffers: Iterable[tuple[RecvInfo, ...]]) -> None:
        for infos in buffers:
            _drop(infos)

    @contextmanager
    def _timed(self, kind: str, micro_batch: int) -> Iterator[None]:
        if self.log is None:
            yield
            return
        start = self._now()
        yield
        self.log.append(TimedAction(Action(self.stage_index, kind, micro_batch), start, self._now()))

    def _now(self) -> float:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def _drop(infos: tuple[RecvInfo, ...]) -> None:
    """Free a micro-batch's buffers."""
    for info in infos:
        info.buffer = None
