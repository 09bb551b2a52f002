"""Generators of the process: torch's default ones, Python's `random` and `numpy.random`.

A resume continues the sequences that a user's model, callback or data set draws from them.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from struct import pack, unpack

import numpy as np
import torch
from torch import Tensor

from threefold.random.rng import stored_as, stream_key

_TORCH, _CUDA, _PYTHON, _NUMPY = "process-torch", "process-cuda", "process-python", "process-numpy"
_NAMES = (_TORCH, _CUDA, _PYTHON, _NUMPY)
_NUMPY_KIND = "MT19937"


class ProcessGenerators:
    """Generators of a rank's process, as tensors with names that are unique in the layout.

    `place` has the rank's coordinates (dp, pp, cp, tp). Torch's default generator of `device` is included, besides the
    CPU's.
    """

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
        own = {self._stored_name(name, sizes): name for name in _NAMES}
        states = {own[stored]: state for stored, state in tensors.items() if stored in own}
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


def seed_generators(seed: int, device: torch.device | str = "cpu") -> None:
    """Seed the generators of this process, including those of the CPU and `device`, with 63 bits."""
    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_states(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the state of each generator as a tensor of constant shape."""
    states = {_TORCH: torch.get_rng_state(), _PYTHON: _python_state(), _NUMPY: _numpy_state()}
    if torch.device(device).type == "cuda":
        states[_CUDA] = torch.cuda.get_rng_state(device)
    return {name: state for name, state in states.items() if state is not None}


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


def _python_state() -> Tensor:
    version, internal, rest = random.getstate()
    return torch.tensor([version, *internal, rest is not None, _as_integer(rest or 0.0)], dtype=torch.int64)


def _numpy_state() -> Tensor | None:
    """Return numpy's state; None if a user has replaced its bit generator."""
    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != _NUMPY_KIND:
        return None
    inner = state["state"]
    rest = (inner["pos"], state["has_gauss"], _as_integer(state["gauss"]))
    return torch.tensor([*inner["key"].tolist(), *rest], dtype=torch.int64)


def _as_integer(value: float) -> int:
    return int(unpack("<q", pack("<d", value))[0])


def _as_float(bits: int) -> float:
    return float(unpack("<d", pack("<q", bits))[0])
