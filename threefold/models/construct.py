"""Calls what a user gave to make a model: a class or a function, with the arguments that a config has for it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from threefold.config import ModelConfig
from threefold.errors import UserError
from threefold.random.generators import generators_preserved, seed_generators
from threefold.random.rng import stream_key

_SECTION: Final = ("config", "cfg")
"""Parameters of a model's constructor that get the whole `model` section."""
_REST: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bound_arguments(factory: Callable[..., Any], config: ModelConfig, said: str) -> dict[str, Any]:
    """The keyword arguments of a model's constructor: those of `model.arguments`, and for parameters without a default
    the settings of their names; `config` is the whole section.

    Raises:
        UserError: an argument is unknown, or one is missing.
    """
    given: Mapping[str, Any] = config.arguments
    parameters = [each for each in inspect.signature(factory).parameters.values() if each.kind not in _REST]
    names = [each.name for each in parameters]
    takes_any = any(each.kind is _REST[1] for each in inspect.signature(factory).parameters.values())
    for name in given:
        if name not in names and not takes_any:
            close = get_close_matches(name, names, n=1)
            near = f"; the nearest is {close[0]}" if close else ""
            raise UserError(f"model.arguments has {name}, which {said} does not take{near}.")
    bound = dict(given)
    for parameter in parameters:
        name = parameter.name
        if name in bound or (parameter.default is not parameter.empty and name not in _SECTION):
            continue
        if name in _SECTION:
            bound[name] = config
        elif name in ModelConfig.model_fields:
            bound[name] = getattr(config, name)
        else:
            raise UserError(f"{said} needs the argument {name}; give it as model.arguments: {{{name}: …}}.")
    return bound


def call(function: Callable[..., Any], positional: tuple[Any, ...], named: Mapping[str, Any], said: str) -> Any:
    """What a function of the user's returns.

    Raises:
        UserError: it raises; begins with `said`.
    """
    try:
        return function(*positional, **named)
    except UserError:
        raise
    except Exception as error:
        advice = _OF_VALUES if "on meta tensors" in str(error) else ""
        raise UserError(f"{said} raises {told(error)}{advice}.") from error


_OF_VALUES = (
    ", as ranks make their parts without memory; give device='cpu' to a tensor whose values the constructor reads"
)


def told(error: Exception) -> str:
    """An exception and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{': ' if first else ''}{first}"


def loss_of(model: Any) -> Any:
    """The attribute `loss` of a model's class; None where there is none, or it is a method of the model."""
    found = getattr(model, "loss", None)
    if inspect.isfunction(found) and next(iter(inspect.signature(found).parameters), "") == "self":
        return None
    return found


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
