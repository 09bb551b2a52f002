"""Cores of this host that a process may use: its affinity and the CPU quotas of its control groups."""

import math
from pathlib import Path

import pytest

from threefold import host
from threefold.host import _cores_of, group_limits, usable_cores


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_smallest_quota_of_all_parents_counts(tmp_path: Path) -> None:
    """Version 1 and 2, mounted together and apart; -1, `max` and a missing file are no quota."""
    write(tmp_path / "job", cpu__max="150000 100000")
    write(tmp_path / "job" / "step", cpu__max="max 100000")
    write(tmp_path / "unified" / "job", cpu__max="50000 10000")
    write(tmp_path / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / "cpu,cpuacct" / "a", cpu__cfs_quota_us="350000", cpu__cfs_period_us="100000")
    write(tmp_path / "cpu,cpuacct" / "a" / "b", cpu__cfs_quota_us="800000", cpu__cfs_period_us="100000")
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/x\n3:cpu,cpuacct:/a/b\n0::/job/step\n")
    assert sorted(group_limits("cpu", _cores_of, groups, tmp_path)) == [1.5, 3.5, 5.0, 8.0]
    groups.write_text("2:cpuset:/a\n1:cpu:/a/b\n")
    (tmp_path / "cpu,cpuacct").rename(tmp_path / "cpu")
    assert sorted(group_limits("cpu", _cores_of, groups, tmp_path)) == [3.5, 8.0]


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (1.5, 2), (0.25, 1), (8.0, 8), (100.0, 8)])
def test_cores_of_a_quota(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(host, "group_limits", lambda controller, read: [quota] if controller == "cpu" else [])
    assert usable_cores() == cores
