"""A stage of the model, and values for its parameters by name."""

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .batches import MicroBatch
from .experts import MixtureOfExperts, Router
from .grid import copied, gather, gathered, part
from .layers import MLP, Attention, Dropout, Embedding, Layout, Norm, Positions, cross_entropy, enter, parameter
from .run import Run


class Block(nn.Module):
    def __init__(self, run: Run, number: int, local_number: int) -> None:
        super().__init__()
        hidden = run.options.hidden
        self.run = run
        self.norm1 = Norm(run, hidden)
        self.attn = Attention(run, number, local_number)
        self.norm2 = Norm(run, hidden)
        experts = run.options.experts and number not in run.options.dense_layers
        self.moe = MixtureOfExperts(run, number) if experts else None
        self.mlp = None if experts else MLP(run)
        self.dropout = Dropout(run)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), micro.positions))
        if self.moe is not None:
            return x + self.dropout(self.moe(self.norm2(x), micro))
        assert self.mlp is not None
        return x + self.dropout(self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """The layers of a pipeline stage, under the names of the whole model.

    The last of several stages has its own copy of a tied embedding, under the same name.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        options, grid = run.options, run.grid
        self.run = run
        if options.layers % grid.pp.size:
            raise SystemExit(f"pp {grid.pp.size} does not divide {options.layers} layers")
        each = options.layers // grid.pp.size
        numbers = range(grid.pp.rank * each, (grid.pp.rank + 1) * each)
        first, last = grid.first_stage, grid.last_stage
        self.embed = Embedding(run) if first or (last and options.tied) else None
        self.position = Positions(run) if first and not options.rotary else None
        self.dropout = Dropout(run)
        self.blocks = nn.ModuleDict({str(n): Block(run, n, at) for at, n in enumerate(numbers)})
        self.norm = Norm(run, options.hidden) if last else None
        self.extra = Extra(run) if last and options.extra_head else None
        self.head = None if not last else Head(run, self.embed) if options.tied else Head(run, Embedding(run))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Return the hidden states of tokens or of the stage before; of the last stage, the weighted loss."""
        if self.run.grid.first_stage:
            assert self.embed is not None
            x = self.embed(x)
            if self.position is not None:
                x = x + self.position(micro.positions)
            x = self.dropout(x)
        for block in self.blocks.values():
            x = self._recomputed(block, x, micro) if self.run.options.recompute else block(x, micro)
        if self.norm is None or self.head is None:
            return x
        x = self.norm(x)
        loss = (self.head(x, micro.labels) * micro.weight).sum()
        if self.extra is not None:
            loss = loss + (self.head(self.extra(x), micro.extra_labels) * micro.extra_weight).sum()
        return loss

    def _recomputed(self, block: nn.Module, x: Tensor, micro: MicroBatch) -> Tensor:
        run = self.run
        state = run.generator.get_state()
        passed = False

        def forward(x: Tensor) -> Tensor:
            nonlocal passed
            if not passed:
                passed = True
                return block(x, micro)
            now = run.generator.get_state()
            run.generator.set_state(state)
            run.recomputing = True
            try:
                return block(x, micro)
            finally:
                run.recomputing = False
                run.generator.set_state(now)

        with self._parts(x) if run.options.save_parts else nullcontext():
            return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    def _parts(self, x: Tensor) -> Any:
        """Keep only this tp rank's part of a block's input."""
        grid = self.run.grid
        axis = grid.dp if self.run.mistake("megatron-7452-4") else grid.tp

        def pack(tensor: Tensor) -> tuple[bool, Tensor]:
            whole = tensor.shape == x.shape and tensor.data_ptr() == x.data_ptr()
            return whole, part(tensor.detach(), grid.tp, 1).clone() if whole else tensor

        def unpack(packed: tuple[bool, Tensor]) -> Tensor:
            whole, tensor = packed
            return torch.cat(gathered(tensor, axis), 1).requires_grad_() if whole else tensor

        return saved_tensors_hooks(pack, unpack)

    def routers(self) -> Iterator[Router]:
        """Routers with a bias to balance, by layer."""
        for block in self.blocks.values():
            assert isinstance(block, Block)
            if block.moe is None:
                continue
            if not block.moe.router.balanced:
                if self.run.mistake("torchtitan-3686"):
                    return
                continue
            yield block.moe.router


class Extra(nn.Module):
    """A linear of its own before the head, to predict the token after the next one."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        hidden = run.options.hidden
        self.weight = parameter(run, hidden, hidden, adds_over_tp=run.options.sp)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Head(nn.Module):
    """Logits split over tp by vocabulary, and the loss of each token."""

    def __init__(self, run: Run, table: Embedding | None) -> None:
        super().__init__()
        assert table is not None
        self.run = run
        self.weight = table.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.run.mistake("bridge-7452-b"):
            # The gradient adds over tp once for the split head, and once more for the gather.
            x = copied(gather(x, self.run.grid.tp, 1, adds=True), self.run.grid.tp)
            return cross_entropy(self.run, F.linear(x, self.weight), labels)
        if not self.run.options.chunked_loss:
            return cross_entropy(self.run, F.linear(enter(self.run, x), self.weight), labels)
        x = x if self.run.mistake("torchtitan-3412") else enter(self.run, x)
        found = []
        for chunk, answers in zip(x.chunk(4, 1), labels.chunk(4, 1), strict=True):
            found.append(cross_entropy(self.run, F.linear(chunk, self.weight), answers))
        return torch.cat(found, 1)


def layout(weight: Tensor) -> Layout:
    found = weight.on_ranks  # type: ignore[attr-defined]
    assert isinstance(found, Layout)
    return found


def named(stage: Stage) -> dict[str, nn.Parameter]:
    """Parameters by their names in the whole model; a tied head is under the embedding's."""
    return dict(stage.named_parameters())


@torch.no_grad()
def initialise(run: Run, stage: Stage) -> None:
    """Give each parameter its part of values that depend on its name and the seed alone."""
    for name, weight in named(stage).items():
        whole = initial(run, name, layout(weight).shape)
        weight.copy_(layout(weight).local(whole))


def initial(run: Run, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the initial values of a whole parameter; none of them 0 or 1, which would hide mistakes."""
    generator = torch.Generator()
    generator.manual_seed(zlib.crc32(name.encode()) + run.options.seed)
    noise = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * noise
    return (0.05 if "bias" in name else 0.5 if name.endswith("sink") else 0.15) * noise
