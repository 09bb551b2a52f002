"""Hardware entries: the catalogue, a user's, that of this machine, and one sentence for each mistake."""

from dataclasses import replace
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.planner import hardware as catalogue
from threefold.planner.hardware import (
    THIS_MACHINE,
    cpu_name,
    entry_of_gpu,
    find_hardware,
    hardware_names,
    peak_rate,
    save_hardware,
    saved_entry,
)

CUSTOM = """
lab:
  like: a100-80
  title: a lab's machines
  gpus_per_node: 4
  between: {bandwidth: 12.5e9}
"""


@pytest.fixture(autouse=True)
def nofollow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    monkeypatch.setattr(catalogue, "user_folder", lambda: folder)
    return folder


def test_every_entry_of_the_catalogue_is_whole() -> None:
    assert {"v100", "a100-40", "a100-80", "h100", "h200", "b200", "mi300x"} <= set(hardware_names())
    for name in hardware_names():
        entry = find_hardware(name)
        assert entry.name == name
        assert entry.sources
        assert entry.matrix_rate("fp16") > 5 * entry.matrix_rate("fp32")
        assert entry.inside.bandwidth > entry.between.bandwidth
        reached = entry.achievable
        for fraction in (reached.matrix, reached.attention, reached.memory, reached.link, reached.network):
            assert 0.2 < fraction <= 1


def test_data_sheets() -> None:
    a100, h100 = find_hardware("a100-80"), find_hardware("H100")
    assert (a100.matrix_rate("bf16"), a100.gpus_per_node, a100.between.bandwidth) == (312e12, 8, 25e9)
    assert (h100.matrix_rate("fp8"), h100.memory_bandwidth, h100.inside.bandwidth) == (1978.9e12, 3352e9, 450e9)


def test_a_file_of_that_name_is_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(CUSTOM)
    with pytest.raises(
        UserError, match=r"The hardware lab is not an entry, but there is a file lab\.yaml here; use that"
    ):
        find_hardware("lab")


def test_missing_rate() -> None:
    with pytest.raises(UserError, match=r"v100 has no matrix rate for bf16; use one of fp16"):
        find_hardware("v100").matrix_rate("bf16")


def test_custom_file_like_another(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(CUSTOM)
    lab, base = find_hardware(str(path)), find_hardware("a100-80")
    assert lab == replace(
        base, name="lab", title="a lab's machines", gpus_per_node=4, between=replace(base.between, bandwidth=12.5e9)
    )


def test_saved_entry_is_found_by_name(nofollow_folder: Path) -> None:
    with pytest.raises(UserError, match="run threefold doctor"):
        find_hardware("this-machine")
    mine = replace(find_hardware("h100"), name="this-machine", device="cpu", dollars_per_hour=None)
    assert save_hardware(mine).parent == nofollow_folder
    assert find_hardware("this-machine") == mine
    assert "this-machine" in hardware_names()


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("like: a100-80", "like: a100", r"like is 'a100' but must be one of .*nearest is a100-40"),
        ("like: a100-80", "like: lab", r"like is 'lab' but must be one of v100, .*mi300x; use v100"),
        ("gpus_per_node: 4", "achievable: {matrix: 3}", "matrix is 3 but must be a share of at most 1; use 1"),
        ("gpus_per_node: 4", "uncertainty: 30", "uncertainty is 30 but must be a share of at most 1"),
        ("like: a100-80", "device: cuda", "matrix_rates is missing"),
        ("gpus_per_node: 4", "gpus_per_nodes: 4", "gpus_per_nodes is not a figure of it.*nearest is gpus_per_node"),
        ("gpus_per_node: 4", "gpus_per_node: 0", "gpus_per_node is 0 but must be a whole number above 0"),
        ("gpus_per_node: 4", "gpus_per_node: 1.5", "gpus_per_node is 1.5 but must be a whole number above 0"),
        ("bandwidth: 12.5e9", "bandwidth: fast", "bandwidth is 'fast' but must be a number above 0"),
        ("{bandwidth: 12.5e9}", "3", "between is 3 but must be a mapping"),
        ("gpus_per_node: 4", "device: tpu", "device is tpu but must be cuda or cpu"),
        ("title: a lab's machines", "title: 3", "title is 3 but must be text"),
        ("gpus_per_node: 4", "achievable: {matrx: 0.5}", "matrx is not a figure.*nearest is matrix"),
        (CUSTOM, "- 3", "must hold hardware entries"),
        (CUSTOM, CUSTOM + "other: {like: h100}", "holds 2 hardware entries"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(CUSTOM.replace(before, after))
    with pytest.raises(UserError, match=sentence):
        find_hardware(str(path))


GB = 10**9


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


def test_ranks_of_a_cpu_share_the_measured_rate(nofollow_folder: Path) -> None:
    assert peak_rate("fp32", "cpu", 2) is None
    measured = replace(
        find_hardware("h100"), name=THIS_MACHINE, device="cpu", title=cpu_name(), matrix_rates={"fp32": 2e9}
    )
    save_hardware(replace(measured, gpus_per_node=8))
    assert peak_rate("fp32", "cpu", 4) == 4e9
    assert peak_rate("fp32", "cpu", 16) == 1e9
    assert peak_rate("bf16", "cpu", 4) is None


def test_an_entry_of_another_machine_or_a_damaged_one_is_not_taken(nofollow_folder: Path) -> None:
    save_hardware(replace(find_hardware("h100"), name=THIS_MACHINE, device="cpu", title="another processor, 2 cores"))
    assert saved_entry(cpu_name()) is None
    (nofollow_folder / f"{THIS_MACHINE}.yaml").write_text("this-machine: {title: 3")
    assert saved_entry(cpu_name()) is None
    assert peak_rate("fp32", "cpu", 4) is None
