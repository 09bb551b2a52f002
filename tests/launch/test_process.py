"""Garbage collections around imports and forks, and limits of a process."""

import gc
import resource
from collections.abc import Iterator

import pytest

from threefold.errors import UserError
from threefold.launch.process import lasting_imports, require_room, shared_objects

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


def test_too_few_open_files_are_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 of them two ranks waited for minutes; with 54 four ranks trained."""
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda kind: (20, 20))
        with pytest.raises(UserError) as raised:
            require_room(2)
        patched.setattr(resource, "getrlimit", lambda kind: (54, 54))
        require_room(4)
        with pytest.raises(UserError, match=r"too few for 5 ranks that are connected to each other; set it to 122 or"):
            require_room(5)
        patched.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
        require_room(64)
    assert str(raised.value) == (
        "A process may have 20 files open here (ulimit -n), too few for 2 ranks that are connected to each other; set "
        "it to 80 or more with `ulimit -n 80`."
    )
