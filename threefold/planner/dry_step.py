"""Measurements of a dry run: memory, collectives and floating-point operations of one rank's training step."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from threefold.comm.mesh import Event
from threefold.config import Config
from threefold.cpu.dropped_attention import DROPPED_ATTENTION, DROPPED_ATTENTION_BACKWARD
from threefold.cpu.tiles import TILED_ATTENTION, TILED_ATTENTION_BACKWARD, shortest_tile, tiles
from threefold.data.loader import Batch
from threefold.ops.kernels import AttentionMask
from threefold.torch_private import fake
from threefold.torch_private.distributed import unreduced_gradients
from threefold.torch_private.fake import FakeTensor, OperationMode, tree_leaves, with_memory
from threefold.torch_private.tensors import storage_key
from threefold.train.step import Engine

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
OTHER = "other"
"""Kind of tensors that nobody has claimed."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Number and bytes of a step's collectives with one operation on one axis, as `Event` counts them."""

    axis: str
    operation: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class DryRunReport:
    """Memory, collectives and floating-point operations of one rank in one training step.

    `parameters` are the elements that the rank updates, and `parameter_bytes` include their compute copies. Activations
    include all memory but weights, gradients and optimizer state: temporary tensors and buffers of collectives too.
    `at_peak` has the bytes by these four kinds when most are alive; `causes` has them with ZeRO's gathered weights
    among `weights` and whole gradients among `gradients`, as `threefold.planner.stage_memory` counts them. `flops` are
    those of matrix products and attention, including recompute; a multiply-add is two.
    """

    rank: int
    coordinates: Mapping[str, int]
    world_size: int
    layers: tuple[str, ...]
    micro_batches: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    at_peak: Mapping[str, int]
    causes: Mapping[str, int]
    collectives: Sequence[CollectiveTotal]
    flops: int


class FakeNumbers(OperationMode):
    """Compute integer operations within a block of fake tensors.

    Operations with a fake argument return fake tensors, and new floating-point tensors are fake. Everything else is
    computed: tokens, labels, positions and their counts. A router's choice, which has no values, is assumed balanced,
    and other ranks are assumed to hold the same integers as this one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_fake(func, args, kwargs):
            if func is fake.SPLIT:  # the norm of billions of elements would take many thousands of pieces
                tensor, size, dim = (*args, 0)[:3]
                args = tensor, max(size, -(-tensor.shape[dim] // _MOST_PARTS)), dim
            return even_choice(func(*args, **kwargs), *args) if func is fake.TOP_K else func(*args, **kwargs)
        with with_memory():
            done = func(*args, **kwargs)
            if func is fake.RECEIVE:  # the other ranks' answers to torch's queries: 1 for yes
                for tensor in args[0]:
                    tensor.fill_(1)
            elif func is fake.ALL_GATHER:
                gathered, shard = args[:2]
                gathered.view(-1, shard.numel()).copy_(shard.flatten())
            return done


_MOST_PARTS = 256


def even_choice(found: tuple[Tensor, Tensor], scores: Tensor, count: int, *_rest: Any) -> tuple[Tensor, Tensor]:
    """Replace the indices of `topk` by ones that choose each column about equally often, in turn."""
    values, indices = found
    with with_memory():
        return values, (torch.arange(indices.numel()) % scores.shape[-1]).view(indices.shape)


def _is_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if any(isinstance(each, FakeTensor) for each in given):
        return True
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if given and (device is None or not given[0].is_meta):
        return False
    # A new tensor, perhaps with the shape of one on the meta device.
    if device is not None and torch.device(device).type == "meta":
        return False
    if dtype is not None:
        return bool(dtype.is_floating_point)
    if given:
        return given[0].is_floating_point()
    return func.overloadpacket is not torch.ops.aten.arange or any(isinstance(each, float) for each in args)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_options: Any) -> int:
    """Count q k and the product with v for all pairs of positions; kernels that skip masked pairs do about half."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (width + v.shape[3])


def _attention_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_options: Any) -> int:
    """Count the scores once more, and two products for each one of the forward pass."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (3 * width + 2 * v.shape[3])


def _tiled(q: Tensor, k: Tensor, v: Tensor, *rest: Any, products: int = 1, drops: bool = False) -> int:
    """Count a window's tiles; documents count as one, as tensors without memory hold no boundaries."""
    window = next(each for each in rest if isinstance(each, int))
    queries = range(k.shape[1] - q.shape[1], k.shape[1])
    least = {} if drops else {"shortest": shortest_tile(q)}
    parts = tiles(1, queries, range(k.shape[1]), AttentionMask(window), **least)
    widths = (2 * products - 1) * q.shape[3] + products * v.shape[3]
    return 2 * len(q) * q.shape[2] * widths * sum(len(tile.queries) * len(tile.keys) for tile in parts)


def _tiled_backward(_grad: Tensor, *arguments: Any, drops: bool = False) -> int:
    return _tiled(*arguments, products=2, drops=drops)


def _linear(x: Tensor, weight: Tensor, *_rest: Any, **_options: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


_FORMULAS: dict[Any, Callable[..., int]] = {
    fake.CPU_ATTENTION: _attention,
    fake.CPU_ATTENTION_BACKWARD: _attention_backward,
    fake.ONEDNN_LINEAR: _linear,
    TILED_ATTENTION.overloadpacket: _tiled,
    TILED_ATTENTION_BACKWARD.overloadpacket: _tiled_backward,
    DROPPED_ATTENTION.overloadpacket: partial(_tiled, drops=True),
    DROPPED_ATTENTION_BACKWARD.overloadpacket: partial(_tiled_backward, drops=True),
}
"""Formulas for operations that torch's registry lacks."""


class FlopCount:
    """Running total of the floating-point operations that it is called with."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        packet = func.overloadpacket
        if packet in _FORMULAS:
            self.total += _FORMULAS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=out))


Observer = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]
"""Callback that takes each operation, its arguments and its result."""


class StorageTracker(OperationMode):
    """Count the storages of tensors that operations return within the block, from creation until they are freed; each
    once, however many tensors share it.

    Excluded are tensors made before the block (unless claimed), tensors on the meta device, and memory that an
    operation allocates and frees internally. `peak` is the maximum number of bytes alive at once, by kind, since the
    start or the last `begin`. The observer is called for all operations.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self._observer = observer
        self._alive: dict[int, tuple[Any, int, str]] = {}  # by the storage's number: reference, bytes, kind
        self._bytes: Counter[str] = Counter()
        self.total = self.most = 0
        self.peak: dict[str, int] = {}
        self._resizes = ExitStack()

    @property
    def alive(self) -> dict[str, int]:
        """Bytes alive now, by kind."""
        return {kind: nbytes for kind, nbytes in self._bytes.items() if nbytes}

    def begin(self) -> None:
        """Restart the search for the peak."""
        self.most, self.peak = self.total, self.alive

    def claim(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Count the storages of these tensors as `kind` from now on, and return the newly claimed bytes."""
        before = self._bytes[kind]
        for tensor in tensors:
            self._note(tensor, kind)
        return self._bytes[kind] - before

    def overlook(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor until it is claimed, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._alive:
            self._alive[key] = (weakref.ref(storage, partial(self._freed, key)), 0, OTHER)

    def __enter__(self) -> Self:
        self._resizes.enter_context(fake.storage_resizes(self._resized))
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._resizes.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for each in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(each, Tensor):
                self._note(each)
        if self._observer is not None:
            self._observer(func, args, kwargs, out)
        return out

    def _note(self, tensor: Tensor, kind: str | None = None) -> None:
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.to_local()
        if tensor.device.type == "meta" and not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = self._alive.get(key)
        if known is None:
            self._alive[key] = (weakref.ref(storage, partial(self._freed, key)), storage.nbytes(), kind or OTHER)
            self._add(storage.nbytes(), kind or OTHER)
        elif kind is not None and kind != known[2]:
            reference, nbytes, before = known
            self._alive[key] = (reference, storage.nbytes(), kind)
            self._bytes[before] -= nbytes
            self._bytes[kind] += nbytes
            self._add(storage.nbytes() - nbytes, kind)  # of one overlooked until now

    def _add(self, nbytes: int, kind: str) -> None:
        self._bytes[kind] += nbytes
        self.total += nbytes
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self._bytes)

    def _freed(self, key: int, _reference: object) -> None:
        _, nbytes, kind = self._alive.pop(key)
        self._add(-nbytes, kind)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._alive:
            reference, before, kind = self._alive[key]
            self._alive[key] = (reference, storage.nbytes(), kind)
            self._add(storage.nbytes() - before, kind)


_GATHERED, _WHOLE = "gathered weights", "whole gradients"


class EngineMemory:
    """Count the memory of an engine's step by kind within the block; the numbers of the step do not change.

    Args:
        tracker: counts the storages.

    Attributes:
        held: bytes of weights, gradients and optimizer state.
    """

    def __init__(self, engine: Engine, tracker: StorageTracker) -> None:
        self._engine, self._tracker, self._block = engine, tracker, ExitStack()

    def __enter__(self) -> Self:
        engine, tracker = self._engine, self._tracker
        states = [state for _, _, state in engine.optimizer.states()]
        weights = (each for weight in engine.model.weights for each in (weight.leaf, weight.master))
        self._block.enter_context(tracker)
        self.held = {
            WEIGHTS: tracker.claim(WEIGHTS, weights),
            OPTIMIZER: tracker.claim(OPTIMIZER, (*states, *(average for _, average in engine.optimizer.averages()))),
            GRADIENTS: 0,
        }
        if engine.parallelism.zero is None:  # else the step makes them
            self.gradients_made()
        else:
            _claim_whole_tensors(engine, tracker, self._block)
        tracker.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._block.close()

    def gradients_made(self) -> None:
        """Count the gradients of the trained weights as such; call it when all are made."""
        trained = self._engine.model.trained
        self.held[GRADIENTS] += self._tracker.claim(
            GRADIENTS, (self._engine.gradients[weight.leaf] for weight in trained)
        )

    def begin(self) -> None:
        """Restart the search for the peak."""
        self._tracker.begin()

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind at the peak; everything but weights, gradients and optimizer state is activations."""
        return _named(self._tracker.peak, {_GATHERED: ACTIVATIONS, _WHOLE: ACTIVATIONS})

    @property
    def causes(self) -> dict[str, int]:
        """Bytes at the peak with gathered weights among the weights and whole gradients among the gradients."""
        return _named(self._tracker.peak, {_GATHERED: WEIGHTS, _WHOLE: GRADIENTS})


@dataclass(frozen=True)
class Measured:
    """Memory and collectives of one measured step; the memory as in `EngineMemory`."""

    held: dict[str, int]
    peak: dict[str, int]
    causes: dict[str, int]
    events: list[Event]


def measure_step(engine: Engine, batch: Batch, observer: Observer | None = None) -> Measured:
    """Run the first training step of an engine with a replica's rows of a global batch. Collective over the world."""
    with EngineMemory(engine, StorageTracker(observer)) as memory, engine.mesh.recorder.recording() as events:
        loss, counted = engine.compute_gradients(batch, 0)
        memory.gradients_made()
        engine.update(loss, counted, 0)
    return Measured(memory.held, memory.peak, memory.causes, events)


def _claim_whole_tensors(engine: Engine, tracker: StorageTracker, block: ExitStack) -> None:
    """Count ZeRO's gathered weights, and gradients not reduce-scattered yet, as separate kinds until the block ends."""
    watched: set[Tensor] = set()

    def gathered(module: nn.Module, _arguments: Any) -> None:
        whole = [each for each in module.parameters() if not isinstance(each, DTensor)]
        tracker.claim(_GATHERED, whole)
        for each in whole:  # torch keeps one object for each
            if each.requires_grad and each not in watched:
                watched.add(each)
                block.callback(each.register_post_accumulate_grad_hook(arrived).remove)

    def arrived(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.claim(_WHOLE, [parameter.grad])

    def computed(sharded: Sequence[FSDPModule], _module: nn.Module, _arguments: Any, outputs: Any) -> None:
        """Claim unreduced gradients when the backward pass reaches a module's outputs: later modules have theirs."""

        def claim(_gradient: Tensor) -> None:
            for module in sharded:
                tracker.claim(_WHOLE, unreduced_gradients(module))

        for tensor in (outputs,) if isinstance(outputs, Tensor) else outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(claim)
                return

    for stage in engine.stages:
        sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            assert isinstance(module, nn.Module)
            gathered(module, ())  # what an earlier step left whole
            block.callback(module.register_forward_pre_hook(gathered).remove)
            block.callback(module.register_forward_hook(partial(computed, sharded)).remove)


def _named(peak: dict[str, int], names: Mapping[str, str]) -> dict[str, int]:
    found = Counter(dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS), 0))
    for kind, nbytes in peak.items():
        found[ACTIVATIONS if kind == OTHER else names.get(kind, kind)] += nbytes
    return dict(found)


def batch_of(config: Config, replica: int) -> Batch:
    """Make a replica's rows of a global batch of synthetic tokens, none of them padding."""
    rows, length = config.train.global_batch_size // config.parallel.dp, config.data.sequence_length
    places = torch.arange(rows * (length + 1)).view(rows, length + 1)
    tokens = (places * 7919 + replica) % config.model.vocab_size
    documents = torch.zeros(rows, length, dtype=torch.int64) if config.data.separate_documents else None
    numbers = torch.arange(replica * rows, (replica + 1) * rows)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), numbers, documents)


def totals(events: Sequence[Event]) -> list[CollectiveTotal]:
    """Sum up the collectives of each axis and operation."""
    counts, nbytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for event in events:
        counts[event.axis, event.operation] += 1
        nbytes[event.axis, event.operation] += event.nbytes
    return [CollectiveTotal(*kind, count, nbytes[kind]) for kind, count in counts.items()]
