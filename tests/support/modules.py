"""The modules of the package that every environment can import."""

import importlib.util
import pkgutil
from collections.abc import Iterator

NEEDS = {"threefold.inference.harness": "lm_eval"}
"""Modules that are written for a package which their users have installed."""


def module_names(package: str = "threefold") -> Iterator[str]:
    """Yield the names of all modules except command lines and those whose package is not installed."""
    folder = importlib.import_module(package).__path__
    for found in pkgutil.walk_packages(folder, f"{package}."):
        needed = NEEDS.get(found.name)
        if not found.name.endswith(".__main__") and (needed is None or importlib.util.find_spec(needed)):
            yield found.name
