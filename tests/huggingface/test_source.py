"""A model by its id on the hub: fetched where the package for it is installed, else one sentence."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from threefold.errors import UserError
from threefold.huggingface import source
from threefold.huggingface.source import check_import

ID = "somebody/Some-Model.1B"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hub(monkeypatch: pytest.MonkeyPatch, found: Path | Exception) -> list[tuple[str, Any]]:
    """Replace the hub's package; return the calls that it gets."""
    calls: list[tuple[str, Any]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        if isinstance(found, Exception):
            raise found
        return str(found)

    package = ModuleType("huggingface_hub")
    package.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(source, "find_spec", lambda name: package)
    return calls


def test_an_id_is_fetched_and_a_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = tmp_path / "cache"
    fetched.mkdir()
    (fetched / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    calls = hub(monkeypatch, fetched)
    assert check_import(ID, Path("run"), False) == fetched
    assert [name for name, _ in calls] == [ID]
    assert "*.safetensors" in calls[0][1]
    assert not any("bin" in pattern for pattern in calls[0][1])
    Path("somebody").mkdir()
    fetched.rename(Path(ID))
    assert check_import(ID, Path("run"), False) == Path(ID)
    assert len(calls) == 1


def test_without_the_package_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^{ID} is not a folder here, and .* huggingface_hub is installed"):
        check_import(ID, Path("run"), False)


def test_what_the_network_answers_is_in_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, OSError("Name or service not known.\nA trace, and advice."))
    with pytest.raises(UserError, match=r"hub \(Name or service not known\); check the name, your"):
        check_import(ID, Path("run"), False)


def test_what_is_wrong_here_is_found_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, OSError("fetched"))
    Path("run").mkdir()
    (Path("run") / "mine").touch()
    with pytest.raises(UserError, match=r"--out run exists already"):
        check_import(ID, Path("run"), False)
    with pytest.raises(UserError, match=r"run/config.json does not exist; give a folder that holds a model"):
        check_import("run", Path("other"), False)
    with pytest.raises(UserError, match=r"no/such/folder/config.json does not exist"):  # no id
        check_import("no/such/folder", Path("other"), False)
    assert calls == []
