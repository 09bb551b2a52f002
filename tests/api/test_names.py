"""The public names: light to import, each there, a wrong one answered with the nearest."""

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

import threefold
from threefold import parallel
from threefold.doors import added, imported


def test_every_public_name_is_found_where_the_tables_say() -> None:
    for name, module in threefold._MODULES.items():
        assert getattr(threefold, name) is getattr(import_module(f"threefold.{module}"), name)
    for name, module in threefold._ROOMS.items():
        assert getattr(threefold, name) is import_module(f"threefold.{module}")
    for name, path in added("NAMES").items():
        assert getattr(threefold, name) is imported(path)
    for name, path in added("TYPES").items():
        assert getattr(threefold.types, name) is imported(path)
    for name in parallel.__all__:
        assert getattr(parallel, name) is getattr(import_module(f"threefold.{parallel._MODULES[name]}"), name)


def test_the_list_of_public_names_is_the_tables_and_sorted() -> None:
    assert (
        threefold.__all__
        == sorted(threefold.__all__)
        == sorted([*threefold._MODULES, *threefold._ROOMS, *added("NAMES")])
    )
    assert set(threefold.__all__) <= set(dir(threefold))


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, threefold; dir(threefold); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_name_that_does_not_exist_proposes_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'load_confg'; did you mean 'load_config'\?"):
        threefold.load_confg  # noqa: B018


def test_the_package_says_that_it_has_types() -> None:
    """PEP 561: the marker lies in the package, and in what is built of it."""
    assert files("threefold").joinpath("py.typed").is_file()
    packaged = tomllib.loads((Path(threefold.__file__).parents[1] / "pyproject.toml").read_text())
    assert packaged["tool"]["setuptools"]["package-data"] == {
        "threefold": [
            "py.typed",
            "__init__.pyi",
            "config/presets.csv",
            "convert/*.toml",
            "planner/*.yaml",
            "planner/*.toml",
            "planner/*.md",
            "planner/page/*",
            "report/page.*",
        ]
    }


PARTS = {
    *("EventRecorder", "SharedMemoryGroup", "PostponedSum"),  # of an axis, which a mesh makes
    *("SharedMemorySizes", "Pieces"),  # of pieces, which `threefold verify` makes tiny, and those of an exact run
    *("GradientUpdate", "ActivationWatches"),  # of a ModelView, which a run makes
    "Simulation",  # of a SimulatedStep, which `simulate` makes
    *("Patterns", "Unit", "AsConstructed", "Drawn", "Cut"),  # of a ModelPlan, which a Plan builds
    *(
        "ParallelConfig",
        "Positions",
        "Entry",
        "GradientStep",
        "LossScale",
        "GradSync",
        "CurrentBatch",
        "BatchRows",
        "LoadedKeys",
        "LayerArithmetic",
        "LayoutResult",
        "Performance",
    ),
    *("Attempt", "Heartbeat"),  # of a run and of a mesh, which the launcher makes
    *(
        "LoopLoader",
        "LoopModel",
        "LoopOptimizer",
        "LoopState",
    ),  # of save and load, which take the models and optimizers made here
    "Batch",  # of tokens, which `before_step` gets
}
"""Types of the package in signatures of public names that no caller has to write."""


def public_names() -> dict[str, Any]:
    """The public names of the package, and those of its rooms by their last part."""
    compat, callbacks = threefold.compat, threefold.callbacks
    rooms = (threefold, callbacks, threefold.pipeline, threefold.types, compat.horovod, compat.paddle)
    found = {name: getattr(room, name) for room in rooms for name in room.__all__}
    return {name: each for name, each in found.items() if not isinstance(each, ModuleType)}


def signatures() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, and the public methods of public classes and their constructors."""
    for name, found in public_names().items():
        if not isinstance(found, type):
            if callable(found) and hasattr(found, "__annotations__"):
                yield name, found
            continue
        for member, value in vars(found).items():
            if member.startswith("_") and member not in ("__init__", "__call__"):
                continue
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, cached_property):
                value = value.func
            value = getattr(value, "__func__", value)
            if callable(value) and hasattr(value, "__annotations__") and not isinstance(value, type):
                yield f"{name}.{member}", value


def types_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, list | tuple):
        for each in annotation:
            yield from types_in(each)
    elif isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    else:
        yield from types_in(get_args(annotation))


def test_the_types_of_public_signatures_are_public_names() -> None:
    import torch
    from pydantic import BaseModel

    from threefold.data.loader import Batch

    known = public_names()
    public = {each for each in known.values() if isinstance(each, type)}
    known |= {"torch": torch, "nn": torch.nn, "Tensor": torch.Tensor, "Batch": Batch, "BaseModel": BaseModel}
    hidden = set()
    for where, function in signatures():
        hints = get_type_hints(function, vars(sys.modules[function.__module__]), known)
        for annotation in hints.values():
            for each in types_in(annotation):
                if each.__module__.startswith("threefold") and each not in public and each.__name__ not in PARTS:
                    hidden.add((each.__name__, where))
    assert hidden == set()
