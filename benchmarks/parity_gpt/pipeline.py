"""One pass of micro-batches through the pipeline: one forward, one backward in turn, with asynchronous sends."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batches import MicroBatch
from .model import Stage, named
from .run import Run


class Pipeline:
    """Runs passes over a stage and adds their gradients up.

    Args:
        run: the run.
        stage: this rank's stage.
        before: called with each micro-batch before its forward pass.
    """

    def __init__(self, run: Run, stage: Stage, before: Callable[[MicroBatch], None]) -> None:
        self.run, self.stage, self.before = run, stage, before
        self._sent: list[tuple[Any, Tensor]] = []
        self._last_shape: tuple[int, ...] | None = None

    def __call__(self, micros: list[MicroBatch]) -> Tensor:
        """Run a pass; return the sum of the losses, 0 but on the last stage.

        The gradients of the pass are divided by its number of micro-batches, then added to what was there.
        """
        earlier = self._set_aside(micros[0])
        loss = self._one_forward_one_backward(micros)
        for name, weight in named(self.stage).items():
            if weight.grad is None:
                continue
            weight.grad /= len(micros)
            if (before := earlier.get(name)) is not None:
                weight.grad += before
        return loss

    def _set_aside(self, micro: MicroBatch) -> dict[str, Tensor | None]:
        """Take the gradients of earlier passes away, so that this one's can be scaled alone."""
        weights = named(self.stage)
        shape, self._last_shape = self._last_shape, tuple(micro.tokens.shape)
        if self.run.mistake("automodel-3530") and shape not in (None, self._last_shape):
            for weight in weights.values():
                weight.grad = None
        if self.run.mistake("torchtitan-1732"):
            return {}
        found = {name: weight.grad for name, weight in weights.items()}
        for weight in weights.values():
            weight.grad = None
        return found

    def _one_forward_one_backward(self, micros: list[MicroBatch]) -> Tensor:
        pp = self.run.grid.pp
        warm_up = min(pp.size - 1 - pp.rank, len(micros))
        waiting: list[tuple[Tensor | None, Tensor]] = []
        deferred: list[dict[str, Tensor]] = []
        loss = torch.zeros(())
        for number, micro in enumerate(micros):
            received, out = self._forward(number, micro)
            waiting.append((received, out))
            if self.run.grid.last_stage:
                loss = loss + out.detach()
            if number >= warm_up:
                deferred.append(self._backward(*waiting.pop(0)))
        while waiting:
            deferred.append(self._backward(*waiting.pop(0)))
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        self._add_deferred(deferred, len(micros))
        return loss

    def _forward(self, number: int, micro: MicroBatch) -> tuple[Tensor | None, Tensor]:
        grid, options = self.run.grid, self.run.options
        self.run.micro_batch = number
        self.before(micro)
        received = None
        if not grid.first_stage:
            rows, length = micro.tokens.shape
            length = length // grid.tp.size if options.sp else length
            received = self._receive((rows, length, options.hidden), grid.pp.rank - 1).requires_grad_()
        out: Tensor = self.stage(micro.tokens if received is None else received, micro)
        if not grid.last_stage:
            self._send(out.detach(), grid.pp.rank + 1)
        return received, out

    def _backward(self, received: Tensor | None, out: Tensor) -> dict[str, Tensor]:
        """Run a micro-batch's backward pass; return the weight gradients that are added later."""
        grid, run = self.run.grid, self.run
        weights = named(self.stage)
        before = {name: weight.grad for name, weight in weights.items()}
        if run.options.zero_bubble:
            for weight in weights.values():
                weight.grad = None
        scale = run.options.loss_scale or 1.0
        if grid.last_stage:
            (out * scale).backward()
        else:
            gradient = self._receive(tuple(out.shape), grid.pp.rank + 1)
            if run.mistake("deepspeed-8154"):
                gradient /= run.options.micro_batches
            out.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, grid.pp.rank - 1)
        if not run.options.zero_bubble:
            return {}
        found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        for name, weight in weights.items():
            weight.grad = before[name]
        return found

    def _add_deferred(self, deferred: list[dict[str, Tensor]], count: int) -> None:
        factor = count if self.run.mistake("pytorch-164777") else 1  # to undo the division that comes
        for name, weight in named(self.stage).items():
            for gradients in deferred:
                if name in gradients:
                    added = gradients[name] * factor
                    weight.grad = added if weight.grad is None else weight.grad + added

    def _send(self, tensor: Tensor, stage: int) -> None:
        pp = self.run.grid.pp
        if self.run.mistake("megatron-4047") and stage > pp.rank:
            # The storage is free before the send has ended, and something else is written there.
            reused = tensor.clone()
            reused[-1:] = tensor[:1]
            tensor = reused
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, pp.ranks[stage], group=pp.group), tensor))

    def _receive(self, shape: tuple[int, ...], stage: int) -> Tensor:
        pp = self.run.grid.pp
        tensor = torch.empty(shape, dtype=self.run.dtype)
        work = dist.irecv(tensor, pp.ranks[stage], group=pp.group)
        assert work is not None
        work.wait()
        return tensor
