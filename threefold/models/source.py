"""Sources of a run's model (the config, a Python file, objects of a Python program), and construction of the model."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from threefold.config import Config, ModelConfig
from threefold.config.loading import config_of
from threefold.config.model import CUSTOM, split_model_file
from threefold.doors import needed
from threefold.errors import UserError
from threefold.models.family import family_of, make_model, model_plan
from threefold.models.plan import Plan, freeze, tying
from threefold.models.sharding import ModelPlan
from threefold.plugins import import_file
from threefold.random.rng import generators_preserved, seed_generators, stream_key

_SECTION: Final = ("config", "cfg")  # constructor parameters that receive the whole `model` section


def bound_arguments(factory: Callable[..., Any], config: ModelConfig, said: str) -> dict[str, Any]:
    """Return the keyword arguments for a model's constructor; raise UserError if one is unknown or missing.

    They are those of `model.arguments`, and settings of the same name for parameters without a default; a parameter
    `config` (or `cfg`) receives the whole section.
    """
    given: Mapping[str, Any] = config.arguments
    known = list(inspect.signature(factory).parameters.values())
    parameters = [each for each in known if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = [each.name for each in parameters]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known)
    for name in given:
        if name not in names and not takes_any:
            near = "".join(f"; the nearest is {each}" for each in get_close_matches(name, names, n=1))
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
        why = (
            "as ranks make their parts without memory; give device='cpu' to a tensor whose values the constructor reads"
        )
        advice = f", {why}" if "on meta tensors" in str(error) else ""
        raise UserError(f"{said} raises {error_line(error)}{advice}.") from error


def error_line(error: Exception) -> str:
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
    """Construct the unsharded model on the CPU; its constructor's random numbers follow from the run's `seed`."""
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


MakeModel = Callable[[], nn.Module]
AnyPlan = Plan | ModelPlan | Callable[..., Plan | ModelPlan]  # a plan, or a function from the `model` section to a plan


class ModelSource(ABC):
    """Source of a model. It can be pickled, so that workers load the model themselves."""

    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        """Return a function that makes the model of a resolved config, and its sharding plan, or raise UserError.

        Both have the adapters of the section `adapter`, and the loss of the section `preference`. The plan's `frozen`
        includes the parameters that `optimizer.frozen` names.
        """
        make, plan = self._load(config)
        if config.adapter.rank:
            make, plan = needed("adapted", "adapter.rank", "adapters")(make, plan, config)
        if config.preference.beta:
            make, plan = needed("preferring", "preference.beta", "preference")(make, plan, config)
        if not config.optimizer.frozen:
            return make, plan
        with torch.device("meta"):
            return make, freeze(plan, make(), config)

    @abstractmethod
    def _load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        """Return what `load` does, with the plan as the model has it."""

    def describe(self, config: Config) -> str:
        """Return the name of the model for output."""
        return str(self)

    def loss(self, config: Config) -> Callable[..., Any] | None:
        """Return the loss that belongs to the model; None if its last layer returns it."""
        return None

    def configured(self, config: Config) -> Config:
        """Return the unresolved config with this source in its `model` section."""
        return config

    def files(self, config: Config) -> tuple[Path, ...]:
        """Return the known Python files of a custom model and its loss; empty if there are none."""
        return ()


@dataclass(frozen=True)
class ConfigSource(ModelSource):
    """Model of a family that the config names."""

    def _load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        return partial(make_model, config.model), model_plan(config.model, config.data.sequence_length)

    def describe(self, config: Config) -> str:
        if config.model.architecture == CUSTOM:
            return str(file_source(config.model))
        experts = f" with {config.model.num_experts} experts" if config.model.num_experts else ""
        return family_of(config.model).title + experts

    def loss(self, config: Config) -> Callable[..., Any] | None:
        return file_source(config.model).loss(config) if config.model.architecture == CUSTOM else None

    def files(self, config: Config) -> tuple[Path, ...]:
        return file_source(config.model).files(config) if config.model.architecture == CUSTOM else ()

    def __str__(self) -> str:
        return "the model of the config"


@dataclass(frozen=True)
class FileSource(ModelSource):
    """Model and plan in a Python file.

    Either the file has the functions `make_model(config)` and `plan(config)`, where `config` is the `model` section;
    then `name` is that of the plan. Or `name` is a class or function that makes the model, and the plan is its
    attribute `plan` or the file's variable `plan`. A function or variable `loss` is the model's loss.
    """

    path: Path
    name: str = ""

    @classmethod
    def parse(cls, text: str, setting: str = "--model") -> "FileSource":
        """Parse `FILE.py` or `FILE.py:NAME`; raise UserError if there is no such file."""
        return cls(*split_model_file(text, setting))

    def _load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        return self.load_section(config.model)

    def load_section(self, config: ModelConfig) -> tuple[MakeModel, ModelPlan]:
        """Load the model of a `model` section: a function that makes it, and its sharding plan."""
        factory, plan = self.parts()
        make = partial(self.make, factory, config)
        complete = complete_plan(plan, make, config, self.path.name)
        return tying(make, complete), complete

    def loss(self, config: Config) -> Callable[..., Any] | None:
        """Return the `loss` of the model's class, or else of the file."""
        module = self._import()
        found = loss_of(getattr(module, self.name, None)) or getattr(module, "loss", None)
        if found is not None and not callable(found):
            raise UserError(f"{self.path.name}: loss is {found!r} but must be a function loss(output, batch).")
        return cast("Callable[..., Any] | None", found)

    def files(self, config: Config) -> tuple[Path, ...]:
        return (self.path,)

    def configured(self, config: Config) -> Config:
        return with_custom_model(config, f"{self.path}:{self.name}" if self.name else str(self.path))

    def __str__(self) -> str:
        return f"{self.path.name}:{self.name or 'plan'}"

    def parts(self, needs_plan: bool = True) -> tuple[Callable[..., Any], Any]:
        """Return the class or function that makes the model, and its plan; None if there is none and none is needed."""
        module = self._import()
        named = getattr(module, self.name, None) if self.name else None
        if _is_model_class(named) or (callable(named) and not hasattr(module, "make_model")):
            plan = getattr(named, "plan", None) or getattr(module, "plan", None)
            if plan is None and needs_plan:
                raise UserError(
                    f"{self.path.name} has no plan of {self.name}; give the class the attribute plan, or the file the "
                    "variable plan: a Plan (`threefold inspect` proposes one)."
                )
            return cast(Callable[..., Any], named), plan
        if not self.name and not hasattr(module, "make_model"):
            kinds = [kind for kind in vars(module).values() if _is_model_class(kind)]
            local = [kind for kind in kinds if kind.__module__ == module.__name__]
            planned = [kind for kind in local if getattr(kind, "plan", None) is not None]
            if len(planned) == 1:
                return planned[0], planned[0].plan
            if local:
                raise UserError(
                    f"{self.path.name} has no function make_model; it needs make_model(config), which returns the "
                    f"model, or name the model's class, as in {self.path.name}:{(planned or local)[-1].__name__}."
                )
        make = self._function(module, "make_model")
        plan = getattr(module, self.name or "plan", None)
        return make, plan if isinstance(plan, Plan | ModelPlan) else self._function(module, self.name or "plan")

    def make(self, factory: Callable[..., Any], config: ModelConfig) -> nn.Module:
        """Make the model of a resolved section."""
        said = f"{self.path.name}: {factory.__name__}"
        if factory.__name__ == "make_model":
            return _made(factory, (config,), {}, f"{said}(config)")
        return _made(factory, (), bound_arguments(factory, config, said), f"{said}()")

    def _function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        found = getattr(module, name, None)
        if not callable(found):
            needs = f"{name}(config), which returns the {'model' if name == 'make_model' else 'ModelPlan'}"
            raise UserError(f"{self.path.name} has no function {name}; it needs {needs}.")
        return cast(Callable[..., Any], found)

    def _import(self) -> ModuleType:
        try:
            return import_file(self.path)
        except Exception as error:
            raise UserError(f"{self.path.name} cannot be imported: {error_line(error)}.") from error


@dataclass(frozen=True)
class ObjectSource(ModelSource):
    """Model and plan as objects of this program; workers import the class again from its module."""

    model: Callable[..., nn.Module]
    plan: AnyPlan | None = None
    custom_loss: Callable[..., Any] | None = None

    def _load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        plan = self.plan if self.plan is not None else getattr(self._class, "plan", None)
        if plan is None:
            raise UserError(f"{self} has no plan; pass plan=Plan(…), or give the class the attribute plan.")
        make = partial(self._make, config.model)
        complete = complete_plan(plan, make, config.model, str(self))
        return tying(make, complete), complete

    def loss(self, config: Config) -> Callable[..., Any] | None:
        return self.custom_loss or loss_of(self._class)

    def files(self, config: Config) -> tuple[Path, ...]:
        return self.code_files()

    def code_files(self) -> tuple[Path, ...]:
        """Return the Python files of the model and its loss; empty if one of them has none."""
        parts = [self._class] if self.custom_loss is None else [self._class, self.custom_loss]
        found = [getattr(inspect.getmodule(part), "__file__", None) for part in parts]
        return tuple(Path(each) for each in found if each) if all(found) else ()

    def configured(self, config: Config) -> Config:
        return with_custom_model(config, "")

    def __str__(self) -> str:
        return getattr(self._class, "__name__", type(self._class).__name__)

    @property
    def _class(self) -> Any:
        """Class or function inside any `functools.partial`."""
        found: Any = self.model
        while isinstance(found, partial):
            found = found.func
        return found

    def _make(self, config: ModelConfig) -> nn.Module:
        return _made(self.model, (), bound_arguments(self.model, config, str(self)), f"{self}()")


def as_source(
    model: "str | Callable[..., nn.Module]", plan: Any = None, loss: Callable[..., Any] | None = None
) -> ModelSource:
    """Return the source of a model given in Python; raise UserError for anything else, such as a constructed model.

    `model` is a class, a function that makes the model, or `"FILE.py:NAME"`; or a plan that also makes the model, with
    a method `build`. The class or the file may have `plan` and `loss`, or the last layer return the loss.
    """
    if isinstance(model, str):
        for name, given in (("plan", plan), ("loss", loss)):
            if given is not None:
                raise UserError(f"model is {model!r} and {name} is given too; the file has it, so leave {name} out.")
        return FileSource.parse(model, "model")
    if isinstance(model, nn.Module) or not callable(model):
        raise UserError(
            f"model is a {_kind(model)} but must be a class or a function that makes the model, such as "
            f"{_kind(model) if isinstance(model, nn.Module) else 'MyModel'}: each rank makes its own part."
        )
    if loss is not None and not callable(loss):
        raise UserError(f"loss is {loss!r} but must be a function loss(output, batch).")
    if plan is None and hasattr(model, "build"):
        plan = model
    return ObjectSource(model, plan, loss)


def file_source(config: ModelConfig) -> FileSource:
    """Return the source for a custom model's file; raise UserError if `model.file` is not set or does not exist."""
    if not config.file:
        raise UserError(
            "model.file is not set, as the model was given to Python as an object; name its file, as in --model "
            "model.py:MyModel."
        )
    return FileSource.parse(config.file, "model.file")


def make_custom_model(config: ModelConfig) -> nn.Module:
    return file_source(config).load_section(config)[0]()


def custom_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    return file_source(config).load_section(config)[1]


def with_custom_model(config: Config, file: str) -> Config:
    """Return an unresolved config with the model of a file; `file` is empty for a model given in Python."""
    sections = config.given()
    model = {key: value for key, value in sections["model"].items() if key != "preset"}
    sections["model"] = model | {"architecture": CUSTOM, "file": file}
    return config_of(sections, (), config.origins, config.derived)


def complete_plan(plan: Any, make: MakeModel, config: ModelConfig, said: str) -> ModelPlan:
    """Return the complete plan of a model, from a `Plan`, a `ModelPlan` or a function that returns one."""
    if callable(plan) and not hasattr(plan, "build"):
        takes_config = bool(inspect.signature(plan).parameters)
        written = f"{said}: {plan.__name__}({'config' if takes_config else ''})"
        plan = call(plan, (config,) if takes_config else (), {}, said=written)
        if not isinstance(plan, Plan | ModelPlan):
            raise UserError(f"{written} returns a {_kind(plan)} but must return a ModelPlan.")
    if isinstance(plan, ModelPlan):
        return plan
    if not hasattr(plan, "build"):
        raise UserError(f"{said}: plan is a {_kind(plan)} but must be a Plan.")
    with torch.device("meta"):
        model = make()
    try:
        return plan.build(model)
    except UserError as error:
        raise UserError(f"{said}: {error}") from None


def _made(factory: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any], said: str) -> nn.Module:
    model = call(factory, positional, named, said)
    if not isinstance(model, nn.Module):
        raise UserError(f"{said} returns a {_kind(model)} but must return a Module.")
    return model


def _is_model_class(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, nn.Module)


def _kind(value: object) -> str:
    return type(value).__name__
