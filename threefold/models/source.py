"""Sources of a run's model: the config, a user's Python file, or objects of a Python program."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from threefold.config import Config, ModelConfig
from threefold.config.model import OWN, split_model_file
from threefold.errors import UserError
from threefold.models.construct import bound_arguments, call, loss_of, told
from threefold.models.family import family_of, make_model, model_plan
from threefold.models.plan import Plan
from threefold.models.sharding import ModelPlan
from threefold.plugins import import_file

MakeModel = Callable[[], nn.Module]
AnyPlan = Plan | ModelPlan | Callable[..., Plan | ModelPlan]
"""A plan, or a function from the `model` section to a plan."""


class ModelSource(ABC):
    """Source of a model. It can be pickled, so that workers load the model themselves."""

    @abstractmethod
    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        """Return a function that makes the model of a resolved config, and the model's sharding plan.

        Raises:
            UserError: there is no such model, or it lacks a required part.
        """

    @abstractmethod
    def describe(self, config: Config) -> str:
        """Return the name of the model for output."""

    def loss(self, config: Config) -> Callable[..., Any] | None:
        """Return the loss that belongs to the model; None if its last layer returns it."""
        return None

    def configured(self, config: Config) -> Config:
        """Return the unresolved config with this source in its `model` section."""
        return config

    def files(self, config: Config) -> tuple[Path, ...]:
        """Return the known Python files of an own model and its loss; empty if there are none."""
        return ()


@dataclass(frozen=True)
class ConfigSource(ModelSource):
    """Model of a family that the config names."""

    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        return partial(make_model, config.model), model_plan(config.model, config.data.sequence_length)

    def describe(self, config: Config) -> str:
        if config.model.architecture == OWN:
            return str(file_source(config.model))
        experts = f" with {config.model.num_experts} experts" if config.model.num_experts else ""
        return family_of(config.model).title + experts

    def loss(self, config: Config) -> Callable[..., Any] | None:
        return file_source(config.model).loss(config) if config.model.architecture == OWN else None

    def files(self, config: Config) -> tuple[Path, ...]:
        return file_source(config.model).files(config) if config.model.architecture == OWN else ()

    def __str__(self) -> str:
        return "the model of the config"


@dataclass(frozen=True)
class FileSource(ModelSource):
    """Model and plan in a Python file.

    Either the file has the functions `make_model(config)` and `plan(config)`, where `config` is the `model` section. Or
    `name` is a class or function that makes the model, and the plan is its attribute `plan` or the file's variable
    `plan`. A function or variable `loss` is the model's loss.

    Attributes:
        path: path of the file.
        name: name of the model's class or of a function that makes it; in a file with `make_model`, of the plan
            instead.
    """

    path: Path
    name: str = ""

    @classmethod
    def parse(cls, text: str, setting: str = "--model") -> "FileSource":
        """Parse `FILE.py` or `FILE.py:NAME`; raise UserError if there is no such file."""
        return cls(*split_model_file(text, setting))

    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        return self.load_section(config.model)

    def load_section(self, config: ModelConfig) -> tuple[MakeModel, ModelPlan]:
        """Load the model of a `model` section: a function that makes it, and its sharding plan.

        Raises UserError if the file cannot be imported or lacks a function, or if a function returns the wrong type.
        """
        module = self._import()
        factory, plan = self._parts(module)
        make = partial(self._make, factory, config)
        return make, complete_plan(plan, make, config, self.path.name, "plan")

    def loss(self, config: Config) -> Callable[..., Any] | None:
        """Return the `loss` of the model's class, or else of the file."""
        module = self._import()
        found = loss_of(getattr(module, self.name, None)) or getattr(module, "loss", None)
        if found is not None and not callable(found):
            raise UserError(f"{self.path.name}: loss is {found!r} but must be a function loss(output, batch).")
        return cast("Callable[..., Any] | None", found)

    def on_meta_device(self, config: ModelConfig) -> tuple[nn.Module, Plan | ModelPlan | None]:
        """Return the model of a resolved section on the meta device, and the file's plan; None if it has none."""
        factory, plan = self._parts(self._import(), needs_plan=False)
        with torch.device("meta"):
            model = self._make(factory, config)
        if plan is None or isinstance(plan, Plan):
            return model, plan
        return model, complete_plan(plan, partial(self._make, factory, config), config, self.path.name, "plan")

    def constructor(self, config: ModelConfig) -> tuple[str, dict[str, Any]]:
        """Return the name of the class or function that makes the model, and its keyword arguments."""
        factory, _ = self._parts(self._import())
        name = factory.__name__
        if name == "make_model":
            return name, {"config": config}
        return name, bound_arguments(factory, config, f"{self.path.name}: {name}")

    def files(self, config: Config) -> tuple[Path, ...]:
        return (self.path,)

    def describe(self, config: Config) -> str:
        return str(self)

    def configured(self, config: Config) -> Config:
        return with_own_model(config, f"{self.path}:{self.name}" if self.name else str(self.path))

    def __str__(self) -> str:
        return f"{self.path.name}:{self.name or 'plan'}"

    def _parts(self, module: ModuleType, needs_plan: bool = True) -> tuple[Callable[..., Any], Any]:
        """Return the class or function that makes the model, and its plan; None if there is none and none is needed."""
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
            return self._only_class(module)
        make = self._function(module, "make_model")
        plan = getattr(module, self.name or "plan", None)
        return make, plan if isinstance(plan, Plan | ModelPlan) else self._function(module, self.name or "plan")

    def _only_class(self, module: ModuleType) -> tuple[Callable[..., Any], Any]:
        own = [kind for kind in vars(module).values() if _is_model_class(kind) and kind.__module__ == module.__name__]
        planned = [kind for kind in own if getattr(kind, "plan", None) is not None]
        if len(planned) == 1:
            return planned[0], planned[0].plan
        if not own:
            return self._function(module, "make_model"), None
        example = (planned or own)[-1].__name__
        raise UserError(
            f"{self.path.name} has no function make_model; it needs make_model(config), which returns the model, or "
            f"name the model's class, as in {self.path.name}:{example}."
        )

    def _make(self, factory: Callable[..., Any], config: ModelConfig) -> nn.Module:
        said = f"{self.path.name}: {factory.__name__}"
        takes_section = factory.__name__ == "make_model"
        positional = (config,) if takes_section else ()
        written = "config" if takes_section else ""
        named = {} if takes_section else bound_arguments(factory, config, said)
        return _made(factory, positional, named, f"{said}({written})")

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
            raise UserError(f"{self.path.name} cannot be imported: {told(error)}.") from error


@dataclass(frozen=True)
class ObjectSource(ModelSource):
    """Model and plan as objects of this program; workers import the class again from its module.

    Attributes:
        model: class of the model, or a function that makes it.
        plan: plan of the model; None for the class's attribute `plan`.
        own_loss: `loss(output, batch)`; None for the class's attribute `loss`, or if the last layer returns the loss.
    """

    model: Callable[..., nn.Module]
    plan: AnyPlan | None = None
    own_loss: Callable[..., Any] | None = None

    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        plan = self.plan if self.plan is not None else getattr(self._class, "plan", None)
        if plan is None:
            raise UserError(f"{self} has no plan; pass plan=Plan(…), or give the class the attribute plan.")
        make = partial(self._make, config.model)
        return make, complete_plan(plan, make, config.model, str(self), "plan")

    def loss(self, config: Config) -> Callable[..., Any] | None:
        return self.own_loss or loss_of(self._class)

    def files(self, config: Config) -> tuple[Path, ...]:
        parts = [self._class, *([] if self.own_loss is None else [self.own_loss])]
        found = [getattr(inspect.getmodule(part), "__file__", None) for part in parts]
        return tuple(Path(each) for each in found if each) if all(found) else ()

    def describe(self, config: Config) -> str:
        return str(self)

    def configured(self, config: Config) -> Config:
        return with_own_model(config, "")

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
    """Return the source of a model given in Python.

    Args:
        model: class, function that makes the model, or `"FILE.py:NAME"`; or a plan that also makes the model, with a
            method `build`.
        plan: plan of the model; None if the class or the file has it.
        loss: `loss(output, batch)`; None if the class or the file has it as `loss`, or if the last layer returns the
            loss.

    Raises:
        UserError: it is something else, such as a model that is already constructed.
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
    """Return the source of an own model's file; raise UserError if `model.file` is not set or does not exist."""
    if not config.file:
        raise UserError(
            "model.file is not set, as the model was given to Python as an object; name its file, as in --model "
            "model.py:MyModel."
        )
    return FileSource.parse(config.file, "model.file")


def make_own_model(config: ModelConfig) -> nn.Module:
    make, _ = file_source(config).load_section(config)
    return make()


def own_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    _, plan = file_source(config).load_section(config)
    return plan


def with_own_model(config: Config, file: str) -> Config:
    """Return an unresolved config with the model of a file; `file` is empty for a model given in Python."""
    from threefold.config.loading import config_of

    sections = config.given()
    sections["model"] = {key: value for key, value in sections["model"].items() if key != "preset"} | {
        "architecture": OWN,
        "file": file,
    }
    return config_of(sections, (), config.origins, config.derived)


def complete_plan(plan: Any, make: MakeModel, config: ModelConfig, said: str, name: str) -> ModelPlan:
    """Return the complete plan of a model, from a `Plan`, a `ModelPlan` or a function that returns one.

    Raises UserError if `plan` is none of these, or does not fit the model.
    """
    if callable(plan) and not hasattr(plan, "build"):
        takes_config = bool(inspect.signature(plan).parameters)
        written = f"{said}: {plan.__name__}({'config' if takes_config else ''})"
        plan = call(plan, (config,) if takes_config else (), {}, said=written)
        if not isinstance(plan, Plan | ModelPlan):
            raise UserError(f"{written} returns a {_kind(plan)} but must return a ModelPlan.")
    if isinstance(plan, ModelPlan):
        return plan
    if not hasattr(plan, "build"):
        raise UserError(f"{said}: {name} is a {_kind(plan)} but must be a Plan.")
    with torch.device("meta"):
        model = make()
    try:
        built: ModelPlan = plan.build(model)
        return built
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
