"""The public names: light to import, each there, a wrong one answered with the nearest."""

import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

import threefold


def test_every_public_name_is_found_where_the_table_says() -> None:
    for name in threefold.__all__:
        assert getattr(threefold, name) is getattr(import_module(f"threefold.{threefold._MODULES[name]}"), name)


def test_the_list_of_public_names_is_the_table_and_sorted() -> None:
    assert threefold.__all__ == sorted(threefold.__all__) == sorted(threefold._MODULES)
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
    assert packaged["tool"]["setuptools"]["package-data"] == {"threefold": ["py.typed"]}
