"""A stage as torch's schedules drive it: what it holds, what it sends, and when it computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo

from threefold.comm.mesh import Mesh
from threefold.models.layers.decoder import SampleInfo
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage import Stage

DeferredWeights = Callable[[], Callable[[], None]]


class Action(NamedTuple):
    """A piece of work of a schedule.

    Attributes:
        stage: its number in the whole pipeline.
        kind: `F` forward, `B` full backward, `I` backward but for the weights that can wait, `W` those weights.
        micro_batch: its number in the step.
    """

    stage: int
    kind: str
    micro_batch: int


class Timed(NamedTuple):
    """When an action ran: seconds of `time.perf_counter`, on this rank."""

    action: Action
    start: float
    end: float


class _Chunk(nn.Module):
    """A stage as torch's schedules call it: they cut tensors among the micro-batches, so facts come one by one."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, labels: Tensor | None = None, **facts: Tensor) -> Tensor:
        out: Tensor = self.stage(x, labels, SampleInfo(**facts))
        return out


class Shapes(NamedTuple):
    """What passes between stages, declared on the meta device so that they need not tell each other.

    Attributes:
        tokens: what the first stage gets.
        activation: what every other stage gets, and every stage but the last gives.
        loss: what the last stage gives.
    """

    tokens: Tensor
    activation: Tensor
    loss: Tensor


class Pipe(PipelineStage):
    """One stage of a rank.

    Beside what torch's class does, it has a buffer for each micro-batch that is under way only, counts what it sends in
    the mesh's recorder, refuses activations of another shape than declared, and can tell when it computed.

    Args:
        stage: the layers.
        number: its place in the pipeline.
        stages: where the others are.
        mesh: this rank's place.
        shapes: what passes between stages.
        deferred: called after each backward pass, gives what computes the weight gradients that it left out.
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
            _Chunk(stage),
            number,
            len(stages.ranks),
            mesh.device,
            input_args=shapes.tokens if number == 0 else shapes.activation,
            output_args=shapes.loss if stage.gives_loss else shapes.activation,
            group=mesh.pp.group,
            dw_builder=deferred,
        )
        self.log: list[Timed] | None = None
        self._recorder, self._declared = mesh.recorder, shapes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._timed("F", fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if not self.is_last:
            self._check(out)
        if not self.has_backward:
            _drop(self.args_recv_info, fwd_chunk_id)
            if self.is_last or self._is_same_rank(self.stage_index + 1):
                del self.fwd_cache[fwd_chunk_id]  # else it is still to be sent
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _drop(self.args_recv_info, bwd_chunk_id)
        _drop(self.grad_recv_info, bwd_chunk_id)

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
            # Gloo sends the memory of a dense tensor as it lies there, whatever its strides.
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

    def _make_buffers(self, infos: tuple[_RecvInfo, ...]) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty_like(self._declared.activation, device=self.device, requires_grad=False)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for micro_batch in range(num_microbatches):
            _drop(self.args_recv_info, micro_batch)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for micro_batch in range(num_microbatches):
            _drop(self.grad_recv_info, micro_batch)

    @contextmanager
    def _timed(self, kind: str, micro_batch: int) -> Iterator[None]:
        if self.log is None:
            yield
            return
        start = self._now()
        yield
        self.log.append(Timed(Action(self.stage_index, kind, micro_batch), start, self._now()))

    def _now(self) -> float:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def _drop(infos: dict[int, tuple[_RecvInfo, ...]], micro_batch: int) -> None:
    """Let go of a micro-batch's buffers."""
    for info in infos[micro_batch]:
        info.buffer = None
