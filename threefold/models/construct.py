"""A whole model as its constructor makes it: the same values on every rank and in every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from threefold.random.generators import generators_preserved, seed_generators
from threefold.random.keys import stream_key


@contextmanager
def keyed_draws(*key: int | str) -> Iterator[None]:
    """Random numbers of torch on the CPU, of `random` and of `numpy.random` follow from `key` alone within the block,
    and go on as before after it."""
    seed = stream_key(*key)
    with generators_preserved(), torch.device("cpu"):
        seed_generators(seed)
        yield


def construct(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The whole model on the CPU, its parameters and buffers as its constructor draws them.

    Args:
        make_model: makes it.
        seed: of the run; the constructor's random numbers follow from it, of torch, `random` and `numpy.random` alike.
    """
    with keyed_draws("weights", seed):
        return make_model()


def skeleton(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The whole model on the meta device, whose plain attributes are those that its constructor draws in `construct`.

    Args:
        make_model, seed: as of `construct`.
    """
    with keyed_draws("weights", seed), torch.device("meta"):
        return make_model()


class ConstructedModel:
    """The whole model of `construct`, made when the first of its values is asked for.

    Args:
        make_model, seed: as of `construct`.
    """

    def __init__(self, make_model: Callable[[], nn.Module], seed: int) -> None:
        self._make_model, self._seed = make_model, seed

    @cached_property
    def _model(self) -> nn.Module:
        return construct(self._make_model, self._seed)

    def parameter(self, name: str) -> Tensor:
        """The whole values of a parameter."""
        return self._model.get_parameter(name).detach()

    def buffer(self, name: str) -> Tensor:
        """The values of a buffer."""
        return self._model.get_buffer(name)


def drawn(fill: Callable[[Tensor], object], name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A whole parameter as `fill` draws it.

    Args:
        fill: fills a tensor in place.
        name: of the parameter in the whole model; with `seed` it keys the random numbers.
        shape: of the whole parameter.
        seed: of the run.
    """
    with keyed_draws("weights", seed, name), torch.no_grad():
        whole = torch.empty(shape)
        fill(whole)
        return whole
