"""Bytes of the tensors that are alive, by what they are: of a real step or of a dry run."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.torch_private.fake import FakeTensor, OperationMode, leaves, storage_resizes
from threefold.torch_private.tensors import number_of

OTHER = "other"
"""What tensors are that nobody has claimed."""

Observer = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]
"""Called with each operation, its arguments and its result."""


class StorageTracker(OperationMode):
    """Counts the storages of tensors that operations return within the block, from when they are made until they are
    freed; each once, however many tensors share it.

    Not counted are tensors that were made before (but for claimed ones), tensors on the meta device, and what an
    operation allocates and frees inside.

    Args:
        observer: of all operations.

    Attributes:
        peak: the most bytes that were alive at once, by kind, since the start or the last `begin`.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self._observer = observer
        self._alive: dict[int, tuple[Any, int, str]] = {}  # by the storage's number: reference, bytes, kind
        self._bytes: Counter[str] = Counter()
        self._total = self._most = 0
        self.peak: dict[str, int] = {}
        self._resizes = ExitStack()

    @property
    def alive(self) -> dict[str, int]:
        """Bytes that are alive now, by kind."""
        return {kind: nbytes for kind, nbytes in self._bytes.items() if nbytes}

    @property
    def total(self) -> int:
        """Bytes that are alive now."""
        return self._total

    @property
    def most(self) -> int:
        """Bytes of `peak`."""
        return self._most

    def begin(self) -> None:
        """Look for the peak from now on."""
        self._most, self.peak = self._total, self.alive

    def claim(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Count the storages of these tensors as `kind` from now on; returns the bytes of those that were not."""
        before = self._bytes[kind]
        for tensor in tensors:
            self._note(tensor, kind)
        return self._bytes[kind] - before

    def __enter__(self) -> Self:
        self._resizes.enter_context(storage_resizes(self._resized))
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._resizes.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._note(out)
        elif out is not None:
            for each in leaves(out):
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
        key = number_of(storage)
        known = self._alive.get(key)
        if known is None:
            self._alive[key] = (weakref.ref(storage, partial(self._freed, key)), storage.nbytes(), kind or OTHER)
            self._add(storage.nbytes(), kind or OTHER)
        elif kind is not None and kind != known[2]:
            self._alive[key] = (known[0], known[1], kind)
            self._bytes[known[2]] -= known[1]
            self._bytes[kind] += known[1]

    def _add(self, nbytes: int, kind: str) -> None:
        self._bytes[kind] += nbytes
        self._total += nbytes
        if self._total > self._most:
            self._most, self.peak = self._total, dict(self._bytes)

    def _freed(self, key: int, _reference: object) -> None:
        _, nbytes, kind = self._alive.pop(key)
        self._add(-nbytes, kind)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = number_of(storage)
        known = self._alive.get(key)
        if known is not None:
            reference, before, kind = known
            self._alive[key] = (reference, storage.nbytes(), kind)
            self._add(storage.nbytes() - before, kind)
