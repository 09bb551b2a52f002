"""In a training step the host reads nothing from its device but the loss and the norm, in one read: on a GPU every
other one would wait until all that is under way is done."""

import ast
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import threefold
from tests.planner.golden_collectives import LAYOUTS
from tests.support.devices import alone_on
from tests.support.parity import LLAMA, MOE, MOE_SIZES, Case, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.random.dropout import Dropout
from threefold.torch_private.fake import OperationMode, tree_leaves
from threefold.torch_private.tensors import storage_key
from threefold.train.step import Engine

_ROOT = Path(threefold.__file__).parents[1]
_aten = torch.ops.aten

_READS = (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.unique_dim, _aten._unique2)
"""Operations whose result the host waits for: a number, or a tensor whose shape depends on values."""
_METHODS = ("tolist", "numpy", "cpu", "__array__", "__reduce_ex__")
"""Tensor methods that read values without an operation."""


_DEVICE_OF = Tensor.device.__get__  # type: ignore[attr-defined]


class HostReads:
    """Record each place in the package that reads a device tensor, or copies one to the device and waits, in the block.

    Args:
        engine: engine whose weights are on the device.

    Attributes:
        places: count by `file: function` of the innermost frame in the package.
    """

    def __init__(self, engine: Engine) -> None:
        self.places: Counter[str] = Counter()
        self.device = engine.mesh.device
        self._known: dict[int, Any] = {}
        for weight in engine.model.weights:
            self.note((weight.leaf, weight.master))
        self.note(state for _, _, state in engine.optimizer.states())
        self._functions, self._operations = _Functions(self), _Operations(self)

    def __enter__(self) -> Counter[str]:
        self._functions.__enter__()
        self._operations.__enter__()
        return self.places

    def __exit__(self, *error: Any) -> None:
        self._operations.__exit__(*error)
        self._functions.__exit__(*error)

    def note(self, tensors: Iterable[Any]) -> None:
        """Mark tensors as the device's."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = _local(tensor).untyped_storage()
                number = storage_key(storage)
                if number not in self._known:
                    forget = lambda _, number=number: self._known.pop(number, None)  # noqa: E731
                    self._known[number] = weakref.ref(storage, forget)

    def has(self, values: Any) -> bool:
        """Return whether any tensor among nested values is the device's."""
        tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        return any(storage_key(_local(each).untyped_storage()) in self._known for each in tensors)

    def is_device(self, values: Any) -> bool:
        return any(each is self.device for each in tree_leaves(values))

    def found(self) -> None:
        """Record a host read at the current place."""
        self.places[_place()] += 1


class _Functions(TorchFunctionMode):
    """Intercept Python calls, to see which name the device."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, reads = kwargs or {}, self.reads
        name = getattr(func, "__name__", "")
        if name in _METHODS and reads.has(args[:1]):
            reads.found()
        if func == _DEVICE_OF and reads.has(args[:1]):
            return reads.device
        out = func(*args, **kwargs)
        if not reads.is_device((args[1:], kwargs)):
            return out
        if name == "to":
            if not reads.has(args[:1]):
                if not kwargs.get("non_blocking"):
                    reads.found()
                out = out.clone()
        elif name in ("tensor", "as_tensor"):
            reads.found()
        reads.note(tree_leaves(out))
        return out


class _Operations(OperationMode):
    """Intercept operations, including those of the backward pass."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, reads = kwargs or {}, self.reads
        if reads.has((args, kwargs)):
            if func.overloadpacket in _READS or _is_masked(func, args):
                reads.found()
            out = func(*args, **kwargs)
            reads.note(tree_leaves(out))
            return out
        return func(*args, **kwargs)


def _is_masked(func: Any, args: Any) -> bool:
    """Return whether a mask selects elements, so that the host must know their number; False where they are filled."""
    if func.overloadpacket is not _aten.index:
        return False
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT / "threefold"):
            return f"{path.relative_to(_ROOT / 'threefold')}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside the package"


STEPS = 2
LOSS_AND_NORM = {"comm/axis.py: all_reduce_values": STEPS}

ON_A_CPU = (
    "ops/kernels.py: backward",  # of a narrow embedding, whose sums a CPU would round
    "models/layers/experts.py: grouped_linear",  # a GPU has a product of groups whose sizes are on the device
    "models/layers/experts.py: _balance",  # `F.one_hot` checks its input on a CPU alone
    "models/layers/experts.py: _taken",  # likewise
)
"""Reads of code that a GPU does not run."""
OF_EXPERTS = (
    "models/layers/experts.py: through",  # where an expert may be full: how many tokens found room
    "parallel/experts.py: run",  # how many tokens each rank sends and receives
)
"""What the host has to know: sizes of tensors that follow from the router's choice."""

ALONE = Case(sequence=12, steps=STEPS)
SMALL = {name: replace(case, shared_memory=False) for name, case in LAYOUTS.items() if case.world_size <= 3}
SMALL["dp2 pp2, ZeRO 3"] = replace(LAYOUTS["dp2 pp2, ZeRO 3"], shared_memory=False)
UNLIMITED = tuple((key, value) for key, value in MOE_SIZES if key != "expert_capacity_factor")
CASES = {
    "gpt": ALONE,
    "dropout": replace(ALONE, dropout=0.1),
    "fp16 with loss scale": replace(ALONE, dtype="fp16"),
    "bf16": replace(ALONE, dtype="bf16"),
    "llama, windows, packed documents": LLAMA,
    "full recompute": replace(ALONE, dropout=0.1, settings=(("train.recompute", "full"),)),
    "selective recompute": replace(ALONE, dropout=0.1, settings=(("train.recompute", "selective"),)),
    "chunked loss": replace(ALONE, settings=(("train.loss_chunk_size", 5),)),
    "muon": replace(ALONE, optimizer="muon"),
    "lion": replace(ALONE, optimizer="lion"),
    "mixture without a capacity": replace(MOE, model=UNLIMITED),
}
WITH_EXPERTS = {
    "mixture": MOE,
    **{name: case for name, case in SMALL.items() if name.startswith("mixture")},
}
CASES |= {name: case for name, case in SMALL.items() if name not in WITH_EXPERTS}
QUICK = ("gpt", "llama, windows, packed documents", "mixture without a capacity", "fp16 with loss scale")
QUICK_LAYOUTS = ("dp3, ZeRO 1", "pp2, zero-bubble")


def test_the_functions_that_may_read_are_there() -> None:
    for place in (*LOSS_AND_NORM, *ON_A_CPU, *OF_EXPERTS):
        file, function = place.split(": ")
        defined = ast.walk(ast.parse((_ROOT / "threefold" / file).read_text()))
        assert function in {each.name for each in defined if isinstance(each, ast.FunctionDef)}, place


def places(case: Case) -> Counter[str]:
    """Where this rank reads tensors in its steps after the first, in which torch's pipelines ask one another whether
    all shapes are known."""
    engine = make_engine(case)
    engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    with HostReads(engine) as found:
        for step in range(1, 1 + STEPS):
            engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
    return found


def reads_of_a_gpu(pool, case: Case) -> list[dict[str, int]]:
    found = pool.run(case.world_size, places, case)
    return [{place: count for place, count in rank.items() if place not in ON_A_CPU} for rank in found]


@sweep(
    "name",
    CASES,
    quick=[place for place, name in enumerate(CASES) if name in (*QUICK, *QUICK_LAYOUTS)],
    slow=slice(0, None, 3),
)
def test_only_loss_and_norm_are_read(pool, name: str) -> None:
    case = CASES[name]
    assert reads_of_a_gpu(pool, case) == [LOSS_AND_NORM] * case.world_size


@sweep("name", WITH_EXPERTS, quick=(0,))
def test_of_experts_the_numbers_of_their_tokens_are_read_too(pool, name: str) -> None:
    for found in reads_of_a_gpu(pool, WITH_EXPERTS[name]):
        assert found.keys() - LOSS_AND_NORM.keys() <= set(OF_EXPERTS)
        assert {place: count for place, count in found.items() if place not in OF_EXPERTS} == LOSS_AND_NORM


class _Reading(Dropout):
    """A layer with a read of each kind that the tests are to find."""

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        if keys is None:
            return x
        with torch.no_grad():
            flat = x.detach().flatten()
            flat.sum().item()
            flat[:2].tolist()
            bool(flat.sum() > 0)
            flat[flat > 0].sum()
            flat.nonzero()
            flat.cpu()
            torch.tensor([1.0], device=x.device)
            torch.zeros(2).to(x.device)
            torch.zeros(2).to(x.device, non_blocking=True)  # which does not wait
        return super().forward(x, keys)


def planted() -> Counter[str]:
    case = replace(ALONE, dropout=0.1)
    engine: Engine = make_engine(case)
    for module in engine.model.modules():
        if isinstance(module, Dropout):
            module.__class__ = _Reading
            break
    with HostReads(engine) as found:
        engine.compute_gradients(shard_of(case, 0, 0), 0)
    return found


def test_reads_are_found(pool) -> None:
    """Eight a micro-batch, of which there are two."""
    (found,) = pool.run(1, planted)
    assert found == {"models/gpt/model.py: forward": 16}


@pytest.mark.gpu
def test_torch_finds_no_other_synchronization(pool) -> None:
    """The same on a GPU, as torch itself sees it: copies and kernels that wait raise an error."""
    pool.run(1, alone_on, "cuda", step_without_synchronization)


def step_without_synchronization() -> None:
    case = replace(ALONE, dropout=0.1, device="cuda")
    engine, waits = make_engine(case), torch.cuda.set_sync_debug_mode
    engine.train_step(shard_of(case, 0, 0), 0)
    batch = shard_of(case, 1, 0)
    waits("error")
    try:
        loss, tokens = engine.compute_gradients(batch, 1)
    finally:
        waits("default")
    engine.update(loss, tokens, 1)
