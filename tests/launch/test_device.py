import os

import pytest

from threefold.errors import UserError
from threefold.launch.device import choose_device, gpu_count
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


def test_ranks_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads_per_rank(1) == cores
    assert threads_per_rank(10_000) == 1
