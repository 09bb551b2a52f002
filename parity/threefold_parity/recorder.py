"""Recorder, which keeps what any training script computes in its first steps, for a comparison."""

import os
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold_parity.adapters import Adapter, Place, is_float, local
from threefold_parity.files import checksum
from threefold_parity.placement import Piece, Placement, whole
from threefold_parity.record import (
    BUFFER,
    GRADIENT,
    INITIAL,
    OUTPUT,
    OUTPUT_GRADIENT,
    STATE,
    TENSOR,
    UPDATE,
    Page,
    facts_file,
    page_file,
    read_weights,
    write_facts,
    write_weights,
)
from threefold_parity.rows import IGNORED, Padding, fingerprints
from threefold_parity.text import UserError, shown
from threefold_parity.torch_private import in_backward_pass

FOLDER, STEPS, AFTER, BYTES, SAVE, LOAD, PERTURB, STOP, WIDE = (
    f"THREEFOLD_PARITY{ending}"
    for ending in ("", "_STEPS", "_AFTER", "_WHOLE", "_SAVE", "_LOAD", "_PERTURB", "_STOP", "_WIDE")
)
"""Variables of the environment that `threefold-parity run` sets."""
DEFAULT_STEPS: Final = 3


class Recorder:
    """Records weights, activations, gradients and updates of the first steps of a training loop.

    Without a folder, given by `folder` or the variable `THREEFOLD_PARITY`, it does nothing and costs nothing.

    Args:
        model: the model of this rank, wrapped for parallelism or not; with a pipeline, a list of the rank's parts.
        optimizer: its optimizer. An update is recorded when its `step` ends; without one, call `after_update`.
        adapter: `Adapter` of a framework, or a function that places tensors (`Place`); plain PyTorch by default.
        folder: folder of the record; every rank writes its own files there.
        steps: number of steps to record, 3 by default.
        axes: sizes of the parallel axes, such as `{"dp": 2, "tp": 4}`, to give factors a name.
        batch_dim: dim of samples in activations, if it is not the adapter's.
        epoch_steps: number of steps of an epoch, for the verdict to say which part of it was seen.
        updates: number of updates that the run has made before: those of the checkpoint that it continues from.
            `THREEFOLD_PARITY_AFTER` is the number of updates after which a record begins.
        wide: whether `parity run` may run the reference in fp64 too, without `--wide`: the recorder then converts
            model, optimizer and inputs, and the script computes in the dtype of its model.

    Raises:
        UserError: the folder has a record already, a variable of the environment is not as expected, the run has made
            more updates than its record begins after, or `--wide` cannot convert the model.

    Example:
        >>> recorder = parity.Recorder(model, optimizer)
        >>> for tokens, labels in loader:
        >>>     loss = loss_of(model(tokens), labels)
        >>>     loss.backward()
        >>>     recorder.after_backward(loss)
        >>>     optimizer.step()
        >>>     optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Any = None,
        adapter: Adapter | Place | None = None,
        *,
        folder: str | Path | None = None,
        steps: int | None = None,
        axes: Mapping[str, int] | None = None,
        batch_dim: int | None = None,
        epoch_steps: int | None = None,
        updates: int = 0,
        wide: bool = False,
    ) -> None:
        place = folder or os.environ.get(FOLDER)
        self._recording = bool(place)
        if not place:
            return
        self._folder = Path(place)
        self._steps = steps or _number(STEPS) or DEFAULT_STEPS
        if dist.is_available() and dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
        else:
            self._rank, self._world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._adapter = adapter if isinstance(adapter, Adapter) else Adapter(adapter)
        self._adapter.bind([model] if isinstance(model, nn.Module) else list(model), optimizer)
        self._is_wide = bool(os.environ.get(WIDE))
        if self._is_wide:
            self._adapter.widen()
        self._batch_dim = self._adapter.batch_dim if batch_dim is None else batch_dim
        self._step = 1
        after = _number(AFTER) or 0
        if updates > after:
            raise UserError(
                f"The run goes on after {updates} updates, but its record begins after {after} (--after, {AFTER}); use "
                f"{updates}, or another checkpoint."
            )
        self._ahead = after - updates
        self._bytes = _number(BYTES) or 0
        self._page = Page()
        self._roots = [_Root(each) for each in self._adapter.roots()]
        self._calls: dict[str, int] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], list[str]]] = {}
        self._awaited: dict[int, list[str]] = {}  # whole names of outputs whose gradients have not come, by tensor
        self._dtypes: set[str] = set()
        self._readers: dict[str, list[str]] = {}
        self._current: tuple[str, ...] | None = None
        self._given: list[str] | None = None
        self._padding = Padding()
        self._noise = _Noise(_number(PERTURB))
        self._gradient_squares: float | None = None
        self._updates_by_hook = False
        self._before: dict[str, list[Tensor]] = {}
        self._has_before = False
        self._facts: dict[str, Any] = {
            "world_size": self._world,
            "steps": 0,
            "planned_steps": self._steps,
            "whole": self._bytes,
            "adapter": self._adapter.name,
            "axes": dict(axes or {}),
            "epoch_steps": epoch_steps or 0,
            "after": self._ahead + updates,
            "dtypes": sorted({str(each.dtype).removeprefix("torch.") for _, each in self._adapter.parameters()}),
            "weight_dtypes": {},
            "versions": _versions(self._adapter.name),
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "perturbed": bool(self._noise),
            "wide": self._is_wide,
            "offers_wide": wide or self._adapter.offers_wide,
            "numbers": {},
            "checksums": [],
        }
        self._numbers = _no_numbers()
        self._random: bytes | None = None
        self._handles: list[Any] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / facts_file(self._rank)).exists():
            raise UserError(
                f"The folder {shown(self._folder)} has a record of rank {self._rank} already; give a new folder in "
                f"{FOLDER}."
            )
        if self._ahead:
            self._watch()
        else:
            self._begin()

    # ---- what a script calls ----------------------------------------------------------------------------------------

    def batch(self, inputs: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Record this rank's samples of a step; call it before the forward passes, in the order of the micro-batches.

        Needed where the model's forward does not get the tokens (a later pipeline stage), gets parts of sequences, or
        to have labels counted. Inputs are (samples, …), whole sequences; labels of -100 do not count. Samples that runs
        pad to other lengths are matched without their padding: the positions where `mask` is 0, or without a mask those
        behind the last label that counts.
        """
        if not self._is_on:
            return
        given = fingerprints(inputs)
        self._given = (self._given or []) + given
        self._padding.note(given, inputs, mask, labels)
        if labels is not None:
            self._numbers["valid_tokens"] += int((local(labels) != IGNORED).sum())

    def after_backward(self, loss: Tensor | float | None = None, norm: Tensor | float | None = None) -> None:
        """Record the gradients: call it after the last backward pass of a step, before they are clipped.

        `loss` and `norm` are what this rank reports; the norm only if it is known already.
        """
        if not self._is_on:
            return
        if loss is not None:
            self.scalar("loss", loss)
        if norm is not None:
            self.scalar("gradient norm", norm)
        self._record_gradients()

    def after_update(self) -> None:
        """Record the update and end the step; only needed without an optimizer that has hooks."""
        if self._recording and not self._updates_by_hook:
            self._end_step()

    def scalar(self, name: str, value: Tensor | float) -> None:
        """Record a number that this rank reports, such as a metric or a norm; every layout must report the same."""
        if self._is_on:
            scalars = self._numbers["scalars"]
            scalars[name] = float(value.detach()) if isinstance(value, Tensor) else float(value)

    def tensor(self, name: str, tensor: Tensor, placement: Placement | None = None) -> None:
        """Record another tensor, whole on this rank or with a placement."""
        if self._is_on:
            mine, placed = self._adapter.placement("tensor", name, tensor.detach())
            self._page.add(TENSOR, name, mine.float() if not mine.is_floating_point() else mine, placement or placed)

    def close(self) -> None:
        """End the recording and remove all hooks."""
        if self._recording:
            self._recording = False
            self._before.clear()
            for handle in self._handles:
                handle.remove()

    @property
    def _is_on(self) -> bool:
        return self._recording and not self._ahead

    # ---- the beginning ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        parameters = list(self._adapter.parameters())
        if load := os.environ.get(LOAD):
            read = read_weights(Path(load))
            for name, parameter in parameters:
                self._adapter.load(name, parameter, read)
            self._adapter.loaded()
        placed = [(name, self._adapter.weight(name, parameter)) for name, parameter in parameters]
        if save := os.environ.get(SAVE):
            write_weights(Path(save), self._rank, self._world, placed)
        for name, parts in placed:
            for tensor, placement in parts:
                self._page.add(INITIAL, name, tensor, placement)
                self._facts["weight_dtypes"][placement.name or name] = str(tensor.dtype).removeprefix("torch.")
        self._record_buffers()
        self._write_page(0)
        if not self._updates_by_hook:
            self._watch()
        for name, module in self._adapter.modules():
            # Before hooks of frameworks, which may replace the input by one that only this module's gradient reaches.
            entered = _hook(self._enter_module, name)
            self._handles += [
                module.register_forward_pre_hook(entered, with_kwargs=True, prepend=True),
                module.register_forward_hook(_hook(self._leave_module, name)),
            ]
        for root in self._roots:  # around the hooks of its modules
            entered = _hook(self._enter_root, root)
            self._handles += [
                root.module.register_forward_pre_hook(entered, with_kwargs=True, prepend=True),
                root.module.register_forward_hook(_hook(self._leave_root)),
            ]
            if self._is_wide:  # behind the hook that takes fingerprints
                widen = root.module.register_forward_pre_hook(
                    lambda _, args, kwargs: _widened((args, kwargs)), with_kwargs=True
                )
                self._handles.append(widen)

    def _watch(self) -> None:
        self._handles += self._adapter.watch(self._before_update, self._end_step)
        self._updates_by_hook = bool(self._handles)

    # ---- forward and backward passes --------------------------------------------------------------------------------

    def _enter_root(self, root: "_Root", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or in_backward_pass() or self._current is not None:
            return
        if self._random is None:
            self._random = _random_state()
        first = next(_tensors((args, kwargs)), None)
        if first is None:
            return
        if self._given is None:  # an input with a gradient comes from another stage and names no sample
            samples = () if first.requires_grad else tuple(fingerprints(first))
            if samples and not first.is_floating_point():
                self._padding.note(samples, first, kwargs.get("attention_mask"), kwargs.get("labels"))
        else:
            dim = self._batch_dim if first.is_floating_point() else 0
            count = first.shape[min(dim, first.dim() - 1)]
            given = tuple(self._given[root.at : root.at + count])
            samples = given if len(given) == count else ()
            root.at += count
        root.passes += 1
        self._numbers["micro_batches"] = max(self._numbers["micro_batches"], root.passes)
        if root is self._roots[0]:
            self._numbers["samples"] += samples
        self._current = samples
        self._calls.clear()

    def _leave_root(self, *_: Any) -> None:
        if not in_backward_pass():
            self._current = None

    def _enter_module(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is None or in_backward_pass():
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        if self._step > 1:
            return
        for tensor in _tensors((args, kwargs)):
            known = self._seen.get(id(tensor))
            if known is not None and known[0]() is tensor:
                readers = self._readers.setdefault(known[1][0], [])
                if name not in readers:
                    readers.append(name)

    def _leave_module(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Record a module's output, and await its gradient under the names of all modules that return it."""
        samples = self._current
        if samples is None or in_backward_pass():
            return None
        is_leaf = next(module.children(), None) is None
        changed, tensor = self._noise.in_output(output) if is_leaf else (None, next(_tensors(output), None))
        if tensor is None or not samples:
            return changed
        call = self._calls.get(name, 1)
        called = name if call == 1 else f"{name} (call {call})"
        recorded = self._record_activation(OUTPUT, [called], samples, tensor)
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor:
            known[1].append(called)
            self._awaited.get(id(known[1]), []).extend(recorded)
            return changed
        names = [called]
        self._seen[id(tensor)] = weakref.ref(tensor), names
        reaches = tensor.requires_grad and not tensor.is_leaf
        if reaches:
            tensor.register_hook(partial(self._record_output_gradient, names, samples))
        if reaches or (torch.is_grad_enabled() and not tensor.requires_grad):  # without: in reentrant recompute
            self._awaited[id(names)] = recorded
        return changed

    def _record_output_gradient(self, names: list[str], samples: tuple[str, ...], gradient: Tensor) -> None:
        self._awaited.pop(id(names), None)
        self._record_activation(OUTPUT_GRADIENT, names, samples, gradient)

    def _record_activation(self, kind: str, names: list[str], samples: tuple[str, ...], tensor: Tensor) -> list[str]:
        """Record an activation or its gradient, and return its names in the whole model."""
        if not self._recording or not tensor.is_floating_point():
            return []
        self._dtypes.add(str(tensor.dtype).removeprefix("torch."))
        placed = [self._adapter.activation(kind, name, tensor.detach()) for name in names]
        mine, placement = placed[-1]
        rows = _rows(mine, replace(placement, name=None), len(samples), self._batch_dim)
        called = [each.name or name for name, (_, each) in zip(names, placed, strict=True)]
        for part in [] if rows is None else self._padding.without(*rows, samples):
            self._page.add_samples(kind, called, *part)
        return called

    # ---- the end of a step ------------------------------------------------------------------------------------------

    def _record_gradients(self) -> None:
        self._page.drop(GRADIENT)
        squares = 0.0
        for name, parameter in self._adapter.parameters():
            for tensor, placement in self._adapter.gradient(name, parameter):
                self._noise.in_place(tensor)
                self._page.add(GRADIENT, name, tensor, placement)
                squares += _squares(tensor)
        self._gradient_squares = squares
        if self._random is not None:
            self._numbers["drew_random_numbers"] = _random_state() != self._random

    def _before_update(self) -> None:
        if not self._is_on:
            return
        if self._gradient_squares is None:
            self._record_gradients()
        elif self._gradient_squares > 0 and self._adapter.clips_before_update:
            squares = 0.0
            for name, parameter in self._adapter.parameters():
                squares += sum(_squares(tensor) for tensor, _ in self._adapter.gradient(name, parameter))
            self.scalar("clip factor", (squares / self._gradient_squares) ** 0.5)
        for name, parameter in self._adapter.parameters():
            parts = [local(tensor) for tensor, _ in self._adapter.weight(name, parameter)]
            kept = self._before.get(name, [])
            if [each.shape for each in kept] == [each.shape for each in parts]:
                for copy, tensor in zip(kept, parts, strict=True):  # new memory would cost more than the copy
                    copy.copy_(tensor)
            else:
                self._before[name] = [tensor.clone() for tensor in parts]
        self._has_before = True

    def _end_step(self) -> None:
        if not self._recording:
            return
        if self._ahead:
            self._ahead -= 1
            if not self._ahead:
                self._begin()
            return
        if self._gradient_squares is None:
            self._record_gradients()
        counters: dict[str, dict[str, float]] = {}
        for name, parameter in self._adapter.parameters():
            weights = self._adapter.weight(name, parameter)
            for index, (tensor, placement) in enumerate(weights):
                # Without a hook before the update, the new weights.
                update = self._before[name][index].neg_().add_(local(tensor)) if self._has_before else tensor
                self._page.add(UPDATE, name, update, placement)
            for key, parts in self._adapter.states(name, parameter):
                for tensor, placement in parts:
                    self._page.add(f"{STATE} {key}", name, local(tensor), placement)
            if found := self._adapter.counters(name, parameter):
                names = [placement.name or name for _, placement in weights] or [name]
                counters |= {each: dict(found) for each in names}
        self._record_buffers()
        for name, value in self._adapter.numbers().items():
            self.scalar(name, value)
        if counters:
            self._numbers["counters"] = counters
        if self._awaited:
            self._numbers["unreached"] = sorted({name for names in self._awaited.values() for name in names})
            self._awaited.clear()
        self._numbers["unpadded"] = self._padding.unpadded
        self._numbers["lengths"] = sorted(self._padding.lengths)
        self._padding = Padding()
        self._facts["numbers"][str(self._step)] = self._numbers
        self._write_page(self._step)
        self._step += 1
        self._numbers = _no_numbers()
        self._given, self._gradient_squares, self._random, self._current = None, None, None, None
        self._has_before = False
        self._seen.clear()
        for root in self._roots:
            root.at = root.passes = 0
        if self._step > self._steps:
            self.close()
            if os.environ.get(STOP):
                self._adapter.leave()

    def _record_buffers(self) -> None:
        for name, buffer in self._adapter.buffers():
            self._page.add(BUFFER, name, *self._adapter.placement("buffer", name, buffer.detach()))

    def _write_page(self, step: int) -> None:
        path = self._folder / page_file(self._rank, step)
        self._page.save(path)
        self._page = Page(self._bytes // self._steps)
        self._facts["checksums"].append(checksum(path))
        facts = {**self._facts, "readers": self._readers, "activation_dtypes": sorted(self._dtypes), "steps": step}
        write_facts(self._folder, self._rank, facts)


def _no_numbers() -> dict[str, Any]:
    """Return the numbers of a step before it begins."""
    return {"samples": [], "micro_batches": 0, "valid_tokens": 0, "scalars": {}}


class _Root:
    """A module that a forward pass begins with: its passes in this step, and the samples they have taken."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.at, self.passes = module, 0, 0


class _Noise:
    """Noise in the last place of every module's output and of every gradient, to learn how far rounding goes."""

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __bool__(self) -> bool:
        return self._generator is not None

    def in_output(self, output: Any) -> tuple[Any, Tensor | None]:
        """Return an output with noise (None without), and its first tensor, as the hook of a module returns it."""
        first = next(_tensors(output), None)
        if self._generator is None or first is None or isinstance(first, DTensor) or not first.is_floating_point():
            return None, first
        noisy = self._noisy(first)
        if noisy.requires_grad:
            noisy.register_hook(self._noisy)
        if output is first:
            return noisy, noisy
        if type(output) in (tuple, list):
            return type(output)(noisy if each is first else each for each in output), noisy
        return None, first

    def in_place(self, gradient: Tensor) -> None:
        if self._generator is not None and gradient.is_floating_point():
            with torch.no_grad():
                gradient.copy_(self._noisy(gradient))

    def _noisy(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose elements are rounded anew, after a change by up to the distance of their neighbours."""
        draws = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        factors = 1 + draws * torch.finfo(tensor.dtype).eps
        return (tensor.double() * factors.to(tensor.device)).to(tensor.dtype)


def _rows(tensor: Tensor, placement: Placement, samples: int, batch_dim: int) -> tuple[Tensor, Placement] | None:
    """Return an activation and its placement with the samples in front; None if they cannot be told apart."""
    if not samples:
        return None
    if tensor.dim() > batch_dim and tensor.shape[batch_dim] == samples:

        def moved(values: Sequence[int]) -> tuple[int, ...]:
            return (values[batch_dim], *values[:batch_dim], *values[batch_dim + 1 :])

        pieces = tuple(Piece(moved(each.local), moved(each.start), moved(each.size)) for each in placement.pieces)
        return tensor.movedim(batch_dim, 0), replace(placement, shape=moved(placement.shape), pieces=pieces)
    flattened = tensor.dim() == 2 and tensor.shape[0] % samples == 0
    if flattened and placement.shape == tuple(tensor.shape):  # (samples · positions, hidden)
        sizes = (samples, -1) if batch_dim == 0 else (-1, samples)
        parts = tensor.reshape(*sizes, tensor.shape[1]).movedim(batch_dim, 0)
        return parts, whole(parts, placement.copy, placement.partial, placement.name)
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or in a result, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _widened(value: Any) -> Any:
    """Return arguments with their floats in fp64."""
    if is_float(value):
        return value.double()
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return {key: _widened(each) for key, each in value.items()} if type(value) is dict else value


def _squares(tensor: Tensor) -> float:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(local(tensor).detach(), dtype=dtype)) ** 2


def _hook(method: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    """Return a method as a plain function.

    A copy of the model shares a function, where it would copy a method with its recorder and the optimizer.
    """

    def hook(*args: Any) -> Any:
        return method(*bound, *args)

    return hook


def _versions(framework: str) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("threefold-parity", framework):
        with suppress(PackageNotFoundError):
            found.setdefault(name, version(name))
    return found


def _random_state() -> bytes:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return b"".join(state.numpy().tobytes() for state in states)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{variable} is {shown(text)} but must be a whole number; use {DEFAULT_STEPS}.")
    return int(text)
