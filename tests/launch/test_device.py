import math
import os

import pytest
import torch

from threefold.errors import UserError
from threefold.host import cpu_quota
from threefold.launch import device, worker
from threefold.launch.device import choose_device, gpu_count, require_gpus
from threefold.launch.worker import threads_per_rank


def test_auto_takes_cuda_only_with_a_gpu_for_each_rank() -> None:
    gpus = gpu_count()
    assert choose_device("auto", "fp32", gpus + 1) == "cpu"
    assert choose_device("auto", "fp64", 1) == "cpu"
    assert choose_device("auto", "bf16", 1) == ("cuda" if gpus else "cpu")
    assert choose_device("cpu", "fp32", 1) == "cpu"


def test_too_few_gpus() -> None:
    ranks = gpu_count() + 1
    with pytest.raises(UserError, match=rf"{gpu_count()} GPUs for {ranks} ranks"):
        choose_device("cuda", "fp32", ranks)


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert cores
    assert threads_per_rank(1) == min(cores, math.ceil(min(cpu_quota(), 10_000)))
    assert threads_per_rank(10_000) == 1


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 2)
    monkeypatch.setattr(worker, "gpu_count", lambda: 2)
    sizes = iter([80 << 30, 40 << 30] * 8)
    properties = type("Properties", (), {"total_memory": property(lambda _: next(sizes))})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties())


@pytest.mark.usefixtures("two_gpus")
def test_over_gloo_ranks_share_gpus() -> None:
    assert choose_device("auto", "fp32", 8, "gloo") == "cuda"
    assert choose_device("auto", "fp64", 8, "gloo") == "cpu"
    assert choose_device("auto", "fp32", 8) == "cpu"
    assert choose_device("cuda", "fp32", 8, "gloo") == "cuda"
    with pytest.raises(UserError, match=r"2 GPUs for 8 ranks; set train.device to cpu, start at most 2 ranks here, or"):
        require_gpus(8)


def test_over_gloo_one_gpu_is_needed() -> None:
    if gpu_count():
        pytest.skip("there is one")
    with pytest.raises(UserError, match=r"this machine has 0 GPUs for 8 ranks; set train.device to cpu\."):
        require_gpus(8, "gloo")


@pytest.mark.usefixtures("two_gpus")
def test_ranks_take_gpus_in_turn_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU each rank sets, and which backend it joins."""
    found: list[tuple[int, str, object]] = []
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(worker, "wait_for_all", lambda: None)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, *, timeout, **_: found.append((chosen.pop(), backend, timeout)),
    )
    for rank in range(5):
        worker.join(worker.RankInfo(rank, 5, rank, 5, "cuda", backend="gloo"), torch.distributed.HashStore(), 10.0)
    worker.join(worker.RankInfo(1, 2, 1, 2, "cuda"), torch.distributed.HashStore(), 10.0)
    assert [gpu for gpu, _, _ in found] == [0, 1, 0, 1, 0, 1]
    assert [backend for _, backend, _ in found] == ["staged_gloo"] * 5 + ["cpu:gloo,cuda:nccl"]
    assert found[0][2] > found[-1][2], "a rank that waits over gloo is seen to wait"
