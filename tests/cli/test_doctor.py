"""`threefold doctor`, as a process of its own, and its mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.planner.hardware import find_hardware


@pytest.mark.slow
def test_a_quick_examination(tmp_path: Path) -> None:
    entry = tmp_path / "here.yaml"
    words = ["doctor", "--quick", "--json", "--save", str(entry), "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "threefold", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert [rates["ranks"] for rates in found["rates"]] == [1, 2]
    assert all(rates["matrix"]["fp32"]["64"] > 0 and rates["memory_bandwidth"] > 0 for rates in found["rates"])
    collectives = found["rates"][1]["collectives"]
    assert set(collectives) == {"all_reduce", "pairs"}
    assert all(each["bandwidth"] > 0 and each["latency"] > 0 for each in collectives.values())
    assert {each["transport"] for each in collectives.values()} == {"shared memory"}
    assert not [finding for finding in found["findings"] if finding["severity"] == "error"]
    assert found["disk"]["bandwidth"] > 0
    hardware = find_hardware(str(entry))
    assert (hardware.name, hardware.device, hardware.gpus_per_node) == ("this-machine", "cpu", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.yaml"]


def test_what_is_checked_before_it_measures(threefold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there, and a file of the user's; a file of its own is written again."""
    examined: list[object] = []

    def examine(*arguments: object) -> None:
        examined.append(arguments)
        raise UserError("examined")

    monkeypatch.setattr("threefold.planner.doctor.examine", examine)
    mine = tmp_path / "lab.yaml"
    mine.write_text("lab: {like: h100}\n")
    for options, sentence in (
        (("--folder", "absent"), "--folder is absent but there is no such folder; name one that exists"),
        (("--save", mine), f"--save is {mine} but doctor has not written that file; name one that does not exist"),
    ):
        status, output, error = threefold("doctor", *options)
        assert (status, output, error.count("\n"), examined) == (2, "", 1, [])
        assert error.startswith(f"Error: {sentence}")
    mine.write_text("this-machine:\n  like: h100\n")
    assert "examined" in threefold("doctor", "--save", mine).error
    assert examined


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("entry.json", "Error: --save is entry.json but must end in .yaml; use entry.yaml."),
        (
            "absent/entry.yaml",
            "Error: --save is absent/entry.yaml but no file can be written there; name one",
        ),
    ],
)
def test_mistakes_are_one_sentence(threefold, tmp_path: Path, path: str, sentence: str) -> None:
    assert threefold("doctor", "--save", path).refusal.startswith(sentence)
