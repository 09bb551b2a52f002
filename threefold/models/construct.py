"""Construction of models from a user's class or function, with the arguments and random numbers of the config."""

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
from threefold.random.rng import generators_preserved, seed_generators, stream_key

_SECTION: Final = ("config", "cfg")
"""Constructor parameters that receive the whole `model` section."""
_REST: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bound_arguments(factory: Callable[..., Any], config: ModelConfig, said: str) -> dict[str, Any]:
    """Return the keyword arguments for a model's constructor; raise UserError if one is unknown or missing.

    They are those of `model.arguments`, and settings of the same name for parameters without a default; a parameter
    `config` (or `cfg`) receives the whole section.
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
    """Call a user's function, and turn any exception into a UserError that begins with `said`."""
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
    """Return an exception's type and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{': ' if first else ''}{first}"


def loss_of(model: Any) -> Any:
    """Return the attribute `loss` of a model's class; None if it has none, or if it is a method of the model."""
    found = getattr(model, "loss", None)
    if inspect.isfunction(found) and next(iter(inspect.signature(found).parameters), "") == "self":
        return None
    return found


@contextmanager
def keyed_draws(*key: int | str) -> Iterator[None]:
    """Derive the block's CPU random numbers of torch, `random` and `numpy.random` from `key`; restore them after."""
    seed = stream_key(*key)
    with generators_preserved(), torch.device("cpu"):
        seed_generators(seed)
        yield


def construct(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Construct the unsharded model on the CPU, with parameters and buffers as its constructor draws them.

    The constructor's random numbers of torch, `random` and `numpy.random` follow from the run's `seed`.
    """
    with keyed_draws("weights", seed):
        return make_model()


def skeleton(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Construct the unsharded model on the meta device, with the same plain attributes as in `construct`."""
    with keyed_draws("weights", seed), torch.device("meta"):
        return make_model()


class ConstructedModel:
    """The unsharded model of `construct`, constructed when a value is first read."""

    def __init__(self, make_model: Callable[[], nn.Module], seed: int) -> None:
        self._make_model, self._seed = make_model, seed

    @cached_property
    def _model(self) -> nn.Module:
        return construct(self._make_model, self._seed)

    def parameter(self, name: str) -> Tensor:
        """Return the unsharded values of a parameter."""
        return self._model.get_parameter(name).detach()

    def buffer(self, name: str) -> Tensor:
        return self._model.get_buffer(name)


def drawn(fill: Callable[[Tensor], object], name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw the values of an unsharded parameter with `fill`, in place, keyed by its name and the run's seed."""
    with keyed_draws("weights", seed, name), torch.no_grad():
        whole = torch.empty(shape)
        fill(whole)
        return whole
