"""Random numbers that no layout changes, and the states of generators.

These are keys of random streams, normal numbers by element position, named streams for code that draws in sequence, and
the generators of the process. A resumed run continues the sequences of these generators: torch's default ones, Python's
`random` and `numpy.random`.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from math import pi, prod
from struct import pack, unpack
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from threefold.errors import UserError


def stream_key(*parts: int | str) -> int:
    """Return a 63-bit key for the stream named by `parts`; different parts give unrelated keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def signed(value: int, bits: int) -> int:
    """Return `value` modulo 2**bits in two's complement, the form of torch's integers."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_MASK32 = 0xFFFFFFFF
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Elements processed at a time: few enough for temporaries to stay in a core's cache, enough for all cores of a GPU."""


def _philox2x32(counter: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return two independent 32-bit words (in int64) for each 64-bit `counter`, by Philox2x32-10."""
    low, high = counter & _MASK32, (counter >> 32) & _MASK32
    round_key = key & _MASK32
    for _ in range(10):
        product = low * 0xD256D193
        low, high = ((product >> 32) & _MASK32) ^ high ^ round_key, product & _MASK32
        round_key = (round_key + 0x9E3779B9) & _MASK32
    return low, high


def _normal(index: Tensor, key: int) -> Tensor:
    """Return standard normal numbers (fp64) for element positions: one Philox block and one Box-Muller pair each."""
    # The upper half of the key goes into the counter's upper half, which element positions hardly reach.
    first, second = _philox2x32(index ^ (signed(key >> 32, 32) << 32), key)
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) / 2**32))
    return radius * torch.cos((second.double() + 0.5) * (2 * pi / 2**32))


def fill_normal_(local: Tensor, std: float, key: int, whole: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
    """Fill a slice at `offset` of a tensor of shape `whole` with its part of N(0, std²), the same for any slicing."""
    if local.numel() == 0 or local.is_meta:
        return local
    parts = [Slice(start, size) for start, size in zip(offset, whole, strict=True)]
    rows = row_major(local.shape[:1], parts[:1], local.device) * prod(whole[1:])
    inner = row_major(local.shape[1:], parts[1:], local.device)
    elements = _AT_ONCE.get(local.device.type, 1 << 15)
    rows_at_once = max(1, elements // inner.numel())
    # In blocks of rows, so that the indices do not need memory of the tensor's size.
    for part, first in zip(local.split(rows_at_once), rows.split(rows_at_once), strict=True):
        index = first.unsqueeze(-1) + inner
        drawn = torch.cat([_normal(some, key) for some in index.flatten().split(elements)])
        part.copy_(drawn.view(part.shape).mul_(std))
    return local


class Positions(Protocol):
    """Positions of a rank's part of a dim within the whole dim."""

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Return the positions (int64 [size]) in the whole dim of a local dim of `size`."""
        ...

    def whole(self, size: int) -> int:
        """Return the size of the whole dim, given the size of the local one."""
        ...


@dataclass(frozen=True)
class Slice:
    """Run of indices from `start`, in a whole dim of `length` (None: the local size)."""

    start: int = 0
    length: int | None = None

    def indices(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + size, device=device)

    def whole(self, size: int) -> int:
        return size if self.length is None else self.length


ALL = Slice()  # the whole dim


def row_major(shape: Sequence[int], parts: Sequence[Positions], device: torch.device) -> Tensor:
    """Return the row-major positions (int64, flat) of elements in the whole tensor, given their `parts` of each dim."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, part in zip(shape, parts, strict=True):
        index = (index.unsqueeze(-1) * part.whole(size) + part.indices(size, device)).flatten()
    return index


STREAMS = "random."  # prefix of the names of stored streams
_AXES = ("dp", "pp", "cp", "tp")


class RandomStreams:
    """Named torch generators for code that draws in sequence: `global` is equal within a tp group, `local` differs.

    `add` creates further streams with a given seed, such as for dropout that several ranks share:

        streams = RandomStreams(seed, mesh.coordinates)
        streams.add("stage", seed + mesh.pp.index)
        with streams.use("stage"):
            x = F.dropout(x, 0.1)

    A module of a model receives the run's streams through its method `use_streams` (`DrawsInSequence`). Checkpoints
    store the state of the streams once they are used, evaluation leaves it unchanged, and recomputed activations repeat
    their draws.

    Args:
        seed: seed of the run.
        place: coordinates of this rank (dp, pp, cp, tp); `global` depends on all but tp, `local` on all.
        device: device whose default generator a stream takes over.

    Attributes:
        used: whether anything was drawn.
        states: state of each stream by name; a change replaces the mapping, so it may be kept.
    """

    def __init__(self, seed: int, place: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.seed, self.place, self.device = seed, place, torch.device(device)
        self.used = False
        self._added: dict[str, int] = {}
        self.reseed()

    def reseed(self, *parts: int | str) -> None:
        """Reset each stream to a state that depends only on the seeds and `parts`."""
        dp, pp, cp, tp = self.place
        self.states = {
            name: self._seeded(stream_key("stream", name, self.seed, *at, *parts))
            for name, at in (("global", (dp, pp, cp)), ("local", (dp, pp, cp, tp)))
        }
        for name, seed in self._added.items():
            self.states[name] = self._seeded(stream_key("stream", name, seed, *parts) if parts else seed)

    def add(self, name: str, seed: int) -> None:
        """Create a stream that draws what torch draws after `torch.manual_seed(seed)`.

        Ranks with equal seeds draw the same numbers.

        Raises:
            UserError: a stream has the same name, or the same seed and would draw the same numbers; or the name has a
                full stop, which separates the parts of a stored name.
        """
        if "." in name:
            raise UserError(
                f"A random stream is called {name!r} but its name has no full stop; use {name.replace('.', '_')!r}."
            )
        if name in self.states:
            raise UserError(f"There is a random stream {name!r} already; give the new one another name.")
        same = next((other for other, known in self._added.items() if known == seed), None)
        if same is not None:
            raise UserError(
                f"The random stream {name!r} has the seed {seed} of {same!r}, so both would draw the same; give it "
                f"another, such as {max(self._added.values()) + 1}."
            )
        self._added[name] = seed
        self.states = {**self.states, name: self._seeded(seed)}

    def use(self, name: str) -> AbstractContextManager[None]:
        """Run a block with torch's default generator on the stream `name`, and restore the generator afterwards.

        Raises:
            UserError: there is no stream of that name.
        """
        if name not in self.states:
            close = get_close_matches(name, self.states, n=1)
            known = f"use {close[0]!r}" if close else f"there are {', '.join(map(repr, self.states))}"
            raise UserError(f"There is no random stream {name!r}; {known}, or make it with `add` first.")
        return self.fork(name)

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Run a block on the stream `name`, like `use`; raise KeyError if there is none."""
        outer = self._default_state()
        self._set_default_state(self.states[name])
        self.used = True
        try:
            yield
        finally:
            self.states = {**self.states, name: self._default_state()}
            self._set_default_state(outer)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of each stream."""
        return dict(self.states)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.states = {**self.states, **state}

    @contextmanager
    def preserved(self, start: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Run a block from the state `start`, or from the current state, and restore the streams afterwards."""
        outer = self.state_dict()
        self.load_state_dict(start or outer)
        try:
            yield
        finally:
            self.load_state_dict(outer)

    def replays(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for `torch.utils.checkpoint`'s forward pass and its replay, which repeats the draws."""
        return nullcontext(), self.preserved(self.state_dict())

    def stored(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Return the state of each stream under a name that is unique in the layout, to be saved or filled in place."""
        dp, pp, cp, tp = self.place
        common, mine = f"{dp}.{pp}.{cp}", f"{dp}.{pp}.{cp}.{tp}"
        names = {name: f"{stored_as(sizes)}{name}.{common if name == 'global' else mine}" for name in self.states}
        return {names[name]: state.clone() for name, state in self.states.items()}

    def load_stored(self, tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> None:
        """Continue from the tensors of `stored`, once they are filled."""
        self.load_state_dict({name.removeprefix(stored_as(sizes)).split(".")[0]: t for name, t in tensors.items()})
        self.used = True

    def _seeded(self, seed: int) -> Tensor:
        return torch.Generator(self.device).manual_seed(seed).get_state()

    def _default_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_default_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def stored_as(sizes: Sequence[int]) -> str:
    """Return the prefix of the names under which a run with these sizes of (dp, pp, cp, tp) stores its streams."""
    return STREAMS + "-".join(f"{axis}{size}" for axis, size in zip(_AXES, sizes, strict=True)) + "."


@runtime_checkable
class DrawsInSequence(Protocol):
    """Module that draws from the run's streams; its method is called before its first use."""

    def use_streams(self, streams: RandomStreams) -> None:
        """Draw from `streams` from now on."""
        ...


def draws_in_sequence(module: nn.Module) -> bool:
    return isinstance(module, DrawsInSequence)


def give_streams(streams: RandomStreams, module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, DrawsInSequence):
            child.use_streams(streams)


_NAMES = _TORCH, _CUDA, _PYTHON, _NUMPY = "process-torch", "process-cuda", "process-python", "process-numpy"
_NUMPY_KIND = "MT19937"


class ProcessGenerators:
    """Generators of a rank's process, torch's of `device` besides the CPU's, as tensors under unique names."""

    def __init__(self, place: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.place, self.device = tuple(place), torch.device(device)
        self._start = generator_states(self.device)
        self._kept: set[str] = set()

    def stored(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Return the states of the generators used since the start, by stored name in a layout of these sizes."""
        states = generator_states(self.device)
        self._kept |= {name for name, state in states.items() if not torch.equal(state, self._start[name])}
        return {self._stored_name(name, sizes): state for name, state in states.items() if name in self._kept}

    def places(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Return tensors to fill with the states of `stored`, by stored name."""
        return {self._stored_name(name, sizes): state for name, state in generator_states(self.device).items()}

    def load_stored(self, tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> None:
        """Continue from filled `places`, or from some of them."""
        names = {self._stored_name(name, sizes): name for name in _NAMES}
        states = {names[stored]: state for stored, state in tensors.items() if stored in names}
        restore_generators(states, self.device)
        self._kept |= states.keys()

    def begin(self, seed: int) -> None:
        """Set each generator to the initial state of a run, which depends on its seed and this rank's coordinates."""
        self._seed(seed)
        self._start = generator_states(self.device)

    def reseed(self, *parts: int | str) -> None:
        """Set each generator to a state that depends only on `parts` and this rank's coordinates."""
        self._seed(*parts)
        self._kept |= generator_states(self.device).keys()

    def _seed(self, *parts: int | str) -> None:
        # Equal on all tensor ranks, because they compute with the same activations.
        seed_generators(stream_key("process", *self.place[:-1], *parts), self.device)

    def _stored_name(self, name: str, sizes: Sequence[int]) -> str:
        return f"{stored_as(sizes)}{name}.{'.'.join(map(str, self.place))}"


def is_of_process(name: str) -> bool:
    return any(f".{each}." in name for each in _NAMES)


@contextmanager
def generators_preserved(device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the generators of this process after the block."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def fixed_generators(purpose: str) -> Iterator[None]:
    """Give the block generators of its own, in the same state in each process; those of the process go on after it."""
    with generators_preserved():
        seed_generators(stream_key(purpose))
        yield


def seed_generators(seed: int, device: torch.device | str = "cpu") -> None:
    """Seed the generators of this process, including those of the CPU and `device`, with 63 bits."""
    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_states(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the state of each generator as a tensor of constant shape."""
    version, internal, rest = random.getstate()
    python = [version, *internal, rest is not None, _as_integer(rest or 0.0)]
    states = {_TORCH: torch.get_rng_state(), _PYTHON: torch.tensor(python, dtype=torch.int64)}
    numpy = np.random.get_state(legacy=False)
    if isinstance(numpy, dict) and numpy["bit_generator"] == _NUMPY_KIND:  # which a user may have replaced
        inner = numpy["state"]
        values = [*inner["key"].tolist(), inner["pos"], numpy["has_gauss"], _as_integer(numpy["gauss"])]
        states[_NUMPY] = torch.tensor(values, dtype=torch.int64)
    if torch.device(device).type == "cuda":
        states[_CUDA] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    if _TORCH in states:
        torch.set_rng_state(states[_TORCH])
    if _CUDA in states:
        torch.cuda.set_rng_state(states[_CUDA], device)
    if _PYTHON in states:
        version, *internal, drawn, rest = states[_PYTHON].tolist()
        random.setstate((version, tuple(internal), _as_float(rest) if drawn else None))
    if _NUMPY in states:
        *keys, position, drawn, rest = states[_NUMPY].tolist()
        np.random.set_state((_NUMPY_KIND, np.array(keys, dtype=np.uint32), position, drawn, _as_float(rest)))


def _as_integer(value: float) -> int:
    return int(unpack("<q", pack("<d", value))[0])


def _as_float(bits: int) -> float:
    return float(unpack("<d", pack("<q", bits))[0])
