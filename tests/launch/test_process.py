"""Garbage collections around imports and forks."""

import gc
from collections.abc import Iterator

import pytest

from threefold.launch.process import lasting_imports, shared_objects

MANY = 10_000
"""Fewer objects than any process of the tests has."""


@pytest.fixture
def _collector() -> Iterator[None]:
    assert gc.isenabled()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("_collector")
def test_imports_without_collections() -> None:
    with lasting_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > MANY, "later collections look at what is there"
    gc.disable()
    with pytest.raises(ZeroDivisionError), lasting_imports():
        print(1 / 0)
    assert not gc.isenabled(), "as it was"


@pytest.mark.usefixtures("_collector")
def test_forks_leave_objects_to_their_parent() -> None:
    with shared_objects():
        assert gc.get_freeze_count() > MANY
    assert gc.get_freeze_count() == 0
