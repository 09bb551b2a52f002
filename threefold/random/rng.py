"""Keys of random streams: what a stream is for, as a number."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from math import pi, prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from threefold.errors import UserError


def stream_key(*parts: int | str) -> int:
    """A 63-bit key for the stream named by `parts`; different parts give unrelated keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def signed(value: int, bits: int) -> int:
    """`value` modulo 2**bits as a two's complement number, which is what torch's integers hold."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_MASK32 = 0xFFFFFFFF
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Elements worked on at a time: the temporaries stay in a core's cache; on a GPU they are enough for all its cores."""


def _philox2x32(counter: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Philox2x32-10: two independent 32-bit words (in int64) for each 64-bit `counter`."""
    low, high = counter & _MASK32, (counter >> 32) & _MASK32
    round_key = key & _MASK32
    for _ in range(10):
        product = low * 0xD256D193
        low, high = ((product >> 32) & _MASK32) ^ high ^ round_key, product & _MASK32
        round_key = (round_key + 0x9E3779B9) & _MASK32
    return low, high


def _normal(index: Tensor, key: int) -> Tensor:
    """Standard normal numbers (fp64) at these element positions: one Philox block and one Box-Muller pair each."""
    # The upper half of the key is mixed into the counter's upper half, which element positions hardly reach.
    first, second = _philox2x32(index ^ (signed(key >> 32, 32) << 32), key)
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) / 2**32))
    return radius * torch.cos((second.double() + 0.5) * (2 * pi / 2**32))


def fill_normal_(local: Tensor, std: float, key: int, whole: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
    """Fill a slice of a tensor with its part of N(0, std²), the same numbers whatever the slicing.

    Args:
        local: the slice to fill, of shape [n0, n1, …], any float dtype and device.
        std: standard deviation.
        key: the whole tensor's stream, from `stream_key`.
        whole: shape of the whole tensor.
        offset: where the slice starts in the whole tensor, per dim.
    """
    if local.numel() == 0 or local.is_meta:
        return local
    parts = [Slice(start, size) for start, size in zip(offset, whole, strict=True)]
    rows = row_major(local.shape[:1], parts[:1], local.device) * prod(whole[1:])
    inner = row_major(local.shape[1:], parts[1:], local.device)
    elements = _AT_ONCE.get(local.device.type, 1 << 15)
    rows_at_once = max(1, elements // inner.numel())
    # By blocks of rows, so that the indices need no memory of the tensor's size.
    for part, first in zip(local.split(rows_at_once), rows.split(rows_at_once), strict=True):
        index = first.unsqueeze(-1) + inner
        part.copy_(_normal_chunks(index.flatten(), key, elements).view(part.shape).mul_(std))
    return local


def _normal_chunks(index: Tensor, key: int, elements: int) -> Tensor:
    return torch.cat([_normal(part, key) for part in index.split(elements)])


class Positions(Protocol):
    """Which indices of a dim of a whole tensor a rank holds."""

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Their positions (int64 [size]) in the whole dim, for a local dim of `size`."""
        ...

    def whole(self, size: int) -> int:
        """Size of the whole dim."""
        ...


@dataclass(frozen=True)
class Slice:
    """A run of indices: from `start`, of `length` in all (None: as many as are held)."""

    start: int = 0
    length: int | None = None

    def indices(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + size, device=device)

    def whole(self, size: int) -> int:
        return size if self.length is None else self.length


ALL = Slice()
"""The whole dim."""


def row_major(shape: Sequence[int], parts: Sequence[Positions], device: torch.device) -> Tensor:
    """Row-major positions (int64, flat) that a local tensor's elements have in the whole one, `parts` of each dim."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, part in zip(shape, parts, strict=True):
        index = (index.unsqueeze(-1) * part.whole(size) + part.indices(size, device)).flatten()
    return index


STREAMS = "random."
"""How the names of stored streams begin."""
_AXES = ("dp", "pp", "cp", "tp")


class RandomStreams:
    """Named torch generators for code that draws in sequence: `global` agrees inside a tp group, `local` differs.

    `add` makes further ones, seeded as their user says, such as for dropout that ranks shall have in common:

        streams = RandomStreams(seed, mesh.coordinates)
        streams.add("stage", seed + mesh.pp.index)
        with streams.use("stage"):
            x = F.dropout(x, 0.1)

    A module of a model gets its run's by a method `use_streams` (`DrawsInSequence`). Their state is saved in
    checkpoints once they are used, evaluation leaves it as it was, and recomputed activations draw what they drew the
    first time.

    Args:
        seed: the run's seed.
        place: this rank's coordinates (dp, pp, cp, tp); `global` depends on all but tp, `local` on all.
        device: whose default generator a stream takes over.

    Attributes:
        used: whether anything was drawn.
    """

    def __init__(self, seed: int, place: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.seed, self.place, self.device = seed, place, torch.device(device)
        self.used = False
        self._added: dict[str, int] = {}
        self.reseed()

    def reseed(self, *parts: int | str) -> None:
        """Reset to the state that follows from the seeds and `parts` alone."""
        dp, pp, cp, tp = self.place
        self._states = {
            name: self._seeded(stream_key("stream", name, self.seed, *at, *parts))
            for name, at in (("global", (dp, pp, cp)), ("local", (dp, pp, cp, tp)))
        }
        for name, seed in self._added.items():
            self._states[name] = self._seeded(stream_key("stream", name, seed, *parts) if parts else seed)

    def add(self, name: str, seed: int) -> None:
        """Make a stream that draws what torch draws after `torch.manual_seed(seed)`.

        Ranks whose seeds are equal draw the same.

        Raises:
            UserError: there is a stream of that name, or one with that seed, which would draw the same; or the name has
                a full stop, which separates the parts of a stored name.
        """
        if "." in name:
            raise UserError(
                f"A random stream is called {name!r} but its name has no full stop; use {name.replace('.', '_')!r}."
            )
        if name in self._states:
            raise UserError(f"There is a random stream {name!r} already; give the new one another name.")
        same = next((other for other, known in self._added.items() if known == seed), None)
        if same is not None:
            raise UserError(
                f"The random stream {name!r} has the seed {seed} of {same!r}, so both would draw the same; give it "
                f"another, such as {max(self._added.values()) + 1}."
            )
        self._added[name] = seed
        self._states[name] = self._seeded(seed)

    def use(self, name: str) -> AbstractContextManager[None]:
        """Run a block with torch's default generator on the stream `name`, and put the generator back after it.

        Raises:
            UserError: there is no stream of that name.
        """
        if name not in self._states:
            close = get_close_matches(name, self._states, n=1)
            known = f"use {close[0]!r}" if close else f"there are {', '.join(map(repr, self._states))}"
            raise UserError(f"There is no random stream {name!r}; {known}, or make it with `add` first.")
        return self.fork(name)

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """As `use`.

        Raises:
            KeyError: there is no stream of that name.
        """
        outer = self._default_state()
        self._set_default_state(self._states[name])
        self.used = True
        try:
            yield
        finally:
            self._states[name] = self._default_state()
            self._set_default_state(outer)

    def state_dict(self) -> dict[str, Tensor]:
        """The state of each stream."""
        return dict(self._states)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._states = {**self._states, **state}

    @contextmanager
    def preserved(self, start: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Run a block from the state `start`, or from where the streams are, and put them back after it."""
        outer = self.state_dict()
        self.load_state_dict(start or outer)
        try:
            yield
        finally:
            self.load_state_dict(outer)

    def replays(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What `torch.utils.checkpoint` runs the forward pass in, and its replay: that one draws the same."""
        return nullcontext(), self.preserved(self.state_dict())

    def stored(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The state of each stream, to be saved or filled in place, under a name of its own in the whole layout.

        Args:
            sizes: of the axes (dp, pp, cp, tp).
        """
        dp, pp, cp, tp = self.place
        mine = f"{dp}.{pp}.{cp}.{tp}"
        places = {"global": f"{dp}.{pp}.{cp}"}
        return {
            stored_as(sizes) + f"{name}.{places.get(name, mine)}": state.clone() for name, state in self._states.items()
        }

    def load_stored(self, tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> None:
        """Continue from what `stored` gave, once it is filled."""
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
    """How the names begin under which a run of this layout stores its streams.

    Args:
        sizes: of the axes (dp, pp, cp, tp).
    """
    return STREAMS + "-".join(f"{axis}{size}" for axis, size in zip(_AXES, sizes, strict=True)) + "."


@runtime_checkable
class DrawsInSequence(Protocol):
    """A module that draws from the run's streams defines this method, and which is called before its first use."""

    def use_streams(self, streams: RandomStreams) -> None:
        """Draw from `streams` from now on."""
        ...


def draws_in_sequence(module: nn.Module) -> bool:
    """Whether a module itself draws from the run's streams."""
    return isinstance(module, DrawsInSequence)


def give_streams(streams: RandomStreams, module: nn.Module) -> None:
    """Give `streams` to each module inside that draws in sequence."""
    for child in module.modules():
        if isinstance(child, DrawsInSequence):
            child.use_streams(streams)
