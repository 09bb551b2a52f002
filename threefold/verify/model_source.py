"""The model to verify: that of the config, or one from the user's own Python file, with its sharding plan."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from threefold.config import Config
from threefold.errors import UserError
from threefold.models.registry import family_of, make_model, model_plan
from threefold.models.sharding import ModelPlan
from threefold.parallel.plan_check import check_plan

MakeModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class ConfigSource:
    """The model of `threefold train`."""

    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        """A function that makes the model of a resolved config, and its sharding plan."""
        return partial(make_model, config.model), model_plan(config.model, config.data.sequence_length)

    def describe(self, config: Config) -> str:
        """Name of the model for the output."""
        experts = f" with {config.model.num_experts} experts" if config.model.num_experts else ""
        return family_of(config.model).title + experts

    def __str__(self) -> str:
        return "the model of the config"


@dataclass(frozen=True)
class FileSource:
    """A Python file with `make_model(config)` and a function that returns the plan; `config` is the `model` section.

    Attributes:
        path: the file.
        plan: name of the function that returns the `ModelPlan`.
    """

    path: Path
    plan: str = "plan"

    @classmethod
    def parse(cls, text: str) -> "FileSource":
        """`FILE.py`, or `FILE.py:PLAN`.

        Raises:
            UserError: there is no such file.
        """
        file, _, plan = text.partition(":")
        if not Path(file).is_file():
            raise UserError(f"--model is {text} but {file} is not a file; name a Python file, as in model.py:plan.")
        return cls(Path(os.path.realpath(file)), plan or "plan")

    def load(self, config: Config) -> tuple[MakeModel, ModelPlan]:
        """As `ConfigSource.load`.

        Raises:
            UserError: the file cannot be imported, lacks a function, or a function returns the wrong type.
        """
        module = self._import()
        make, plan = self._function(module, "make_model"), self._function(module, self.plan)
        made = self._call(plan, config)
        if not isinstance(made, ModelPlan):
            raise UserError(
                f"{self.path.name}: {self.plan}(config) returns a {_kind(made)} but must return a ModelPlan."
            )
        return lambda: self._make(make, config), made

    def _make(self, make: Callable[..., Any], config: Config) -> nn.Module:
        model = self._call(make, config)
        if not isinstance(model, nn.Module):
            raise UserError(f"{self.path.name}: make_model(config) returns a {_kind(model)} but must return a Module.")
        return model

    def _call(self, function: Callable[..., Any], config: Config) -> Any:
        try:
            return function(config.model)
        except Exception as error:
            raise UserError(f"{self.path.name}: {function.__name__}(config) raises {_told(error)}.") from error

    def _function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        found = getattr(module, name, None)
        if not callable(found):
            needs = f"{name}(config), which returns the {'model' if name == 'make_model' else 'ModelPlan'}"
            raise UserError(f"{self.path.name} has no function {name}; it needs {needs}.")
        return found

    def _import(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        if spec is None or spec.loader is None:
            raise UserError(f"--model is {self.path} but must be a Python file, as in model.py:plan.")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UserError(f"{self.path.name} cannot be imported: {_told(error)}.") from error
        return module

    def describe(self, config: Config) -> str:
        """As `ConfigSource.describe`."""
        return str(self)

    def __str__(self) -> str:
        return f"{self.path.name}:{self.plan}"


ModelSource = ConfigSource | FileSource


def check_source(source: ModelSource, config: Config) -> int:
    """Check that a model and its sharding plan match, before any layout is run; returns the parameter count.

    Raises:
        UserError: they do not.
    """
    make_model, plan = source.load(config)
    with torch.device("meta"):
        model = make_model()
    try:
        check_plan(model, plan)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return sum(parameter.numel() for parameter in model.parameters())


def _kind(value: object) -> str:
    return type(value).__name__


def _told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{': ' if first else ''}{first}"
