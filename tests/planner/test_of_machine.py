"""The entry of this machine: by the name of its GPU or processor, and the peak rate of one rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from threefold.planner import hardware as catalogue
from threefold.planner import hardware as of_machine
from threefold.planner.hardware import (
    THIS_MACHINE,
    cpu_name,
    entry_of_gpu,
    find_hardware,
    peak_rate,
    save_hardware,
    saved_entry,
)

GB = 10**9


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, empty."""
    for module in (catalogue, of_machine):
        monkeypatch.setattr(module, "user_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("gpu", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 85 * GB, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 42 * GB, "a100-40"),
        ("NVIDIA H100 80GB HBM3", 85 * GB, "h100"),
        ("NVIDIA H200", 150 * GB, "h200"),
        ("NVIDIA B200", 191 * GB, "b200"),
        ("Tesla V100-SXM2-32GB", 34 * GB, "v100"),
        ("AMD Instinct MI300X", 206 * GB, "mi300x"),
        ("NVIDIA H100 PCIe", 85 * GB, None),
        ("NVIDIA GeForce RTX 4090", 24 * GB, None),
        ("NVIDIA GH200 480GB", 100 * GB, None),
    ],
)
def test_gpus_by_the_names_that_drivers_give(gpu: str, memory: int, name: str | None) -> None:
    entry = entry_of_gpu(gpu, memory)
    assert (entry and entry.name) == name


def test_the_peak_rate_of_a_gpu_is_that_of_its_data_sheet() -> None:
    assert peak_rate("bf16", "cuda", 8, ("NVIDIA H100 80GB HBM3", 85 * GB)) == 989.4e12
    assert peak_rate("bf16", "cuda", 8, ("Tesla V100-SXM2-32GB", 34 * GB)) is None  # has none
    assert peak_rate("bf16", "cuda", 8, ("another", GB)) is None


def test_ranks_of_a_cpu_share_the_measured_rate(own_folder: Path) -> None:
    assert peak_rate("fp32", "cpu", 2) is None
    measured = replace(
        find_hardware("h100"), name=THIS_MACHINE, device="cpu", title=cpu_name(), matrix_rates={"fp32": 2e9}
    )
    save_hardware(replace(measured, gpus_per_node=8))
    assert peak_rate("fp32", "cpu", 4) == 4e9
    assert peak_rate("fp32", "cpu", 16) == 1e9
    assert peak_rate("bf16", "cpu", 4) is None


def test_an_entry_of_another_machine_or_a_damaged_one_is_not_taken(own_folder: Path) -> None:
    save_hardware(replace(find_hardware("h100"), name=THIS_MACHINE, device="cpu", title="another processor, 2 cores"))
    assert saved_entry(cpu_name()) is None
    (own_folder / f"{THIS_MACHINE}.yaml").write_text("this-machine: {title: 3")
    assert saved_entry(cpu_name()) is None
    assert peak_rate("fp32", "cpu", 4) is None
