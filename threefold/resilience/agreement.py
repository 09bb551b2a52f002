"""Agreement of ranks: facts that decide a run's numbers, compared over all ranks in one small exchange."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from socket import gethostname
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from threefold.checksums import checksum_of_blocks, short
from threefold.comm.heartbeat import Heartbeat, wait_code
from threefold.errors import UserError
from threefold.files import first_of, shown
from threefold.host import processor_model

Facts = Mapping[str, str]
"""Values in text by name, as an error names them, such as `optimizer.lr`."""

VARIABLES: Final = (
    *("ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "NCCL_ALGO", "NCCL_PROTO"),
)
"""Environment variables that change how torch and its libraries compute or add."""


@dataclass(frozen=True)
class Disagreement:
    """A fact of which ranks have different values.

    Attributes:
        values: each value, with the ranks that have it and their hosts; that of rank 0 first.
    """

    name: str
    values: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]

    def __str__(self) -> str:
        (one, here), (other, there) = list(self.values.items())[:2]
        return f"{self.name} is {shown(one)} on {_place(*here)} but {shown(other)} on {_place(*there)}"


def compare(
    decisive: Facts, told: Facts, heartbeat: Heartbeat | None = None
) -> tuple[list[Disagreement], list[Disagreement]]:
    """Compare facts over all ranks. Collective over the process group: four numbers pass a tree of ranks, and a gather
    of everything follows only if something differs.

    Returns:
        the differences of either mapping, the same on every rank; none in a single process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [], []
    heartbeat = heartbeat or Heartbeat()
    with heartbeat.waiting(wait_code("all_reduce", heartbeat.axis("world", range(dist.get_world_size())))):
        return _compared((decisive, told))


def _compared(mine: tuple[Facts, Facts]) -> tuple[list[Disagreement], list[Disagreement]]:
    digests = [_digest(facts) for facts in mine]
    ends = _largest(torch.tensor([*digests, *(-each for each in digests)]))  # equal to the smallest if all are equal
    highest, lowest = ends[:2], -ends[2:]
    differ = [bool(each) for each in highest != lowest]
    if not any(differ):
        return [], []
    every = _gathered([gethostname(), *(facts if differs else {} for facts, differs in zip(mine, differ, strict=True))])
    hosts = [host for host, _, _ in every]
    return _disagreements(hosts, [each for _, each, _ in every]), _disagreements(hosts, [each for _, _, each in every])


def _largest(mine: torch.Tensor) -> torch.Tensor:
    """Return the elementwise maximum over all ranks, up a binary tree of ranks and down again.

    A rank sends at most three messages in any world, and waits for some 2·log₂ N in turn; those of gloo's all-reduce
    pass all N ranks one after another. On the CPU, which every backend supports.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    below = [each for each in (2 * rank + 1, 2 * rank + 2) if each < size]
    largest, received = mine.clone(), mine.clone()
    for each in below:
        dist.recv(received, each)
        torch.maximum(largest, received, out=largest)
    if rank:
        dist.send(largest, (rank - 1) // 2)
        dist.recv(largest, (rank - 1) // 2)
    for each in below:
        dist.send(largest, each)
    return largest


def require_same(facts: Facts, told: Facts, remedy: str, heartbeat: Heartbeat | None = None) -> list[Disagreement]:
    """Compare facts over all ranks; return the differences of `told`. Collective, as `compare`.

    Raises a `UserError` on every rank if one of `facts` differs. It names the fact, two of its values, their ranks and
    hosts, and the other facts that differ; `remedy` ends the sentence.
    """
    differences, others = compare(facts, told, heartbeat)
    if not differences:
        return others
    first, *more = differences
    names = first_of([each.name for each in more])
    also = f", and {names} {'differs' if len(more) == 1 else 'differ'} too" if more else ""
    raise UserError(f"{first}{also}; {remedy}.")


def require_same_processes(device: torch.device) -> list[Disagreement]:
    """Compare versions, environment and switches of all processes; return differences of processors. Collective.

    Raises a `UserError` on every rank if anything else differs.
    """
    remedy = "start every rank with the same code and environment"
    return require_same(facts_of_process(), {"the processor": processor(device)}, remedy)


def require_same_arguments(function: str, arguments: Mapping[str, object]) -> None:
    """Raise a `UserError` on every rank unless all ranks call a function with the same arguments. Collective."""
    facts = {f"{name} of {function}": _ADDRESS.sub("", repr(value)) for name, value in arguments.items()}
    require_same(facts, {}, "call it with the same arguments and the same code on every rank")


_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
"""What the text of a function has of this process alone."""


def facts_of_process() -> dict[str, str]:
    """Return the versions, environment variables and switches of this process that change what it computes."""
    matmul = torch.backends.cuda.matmul
    return {
        "the version of Threefold": f"{version('threefold')} with the sources {sources_checksum()}",
        "the version of PyTorch": str(torch.__version__),
        "the version of Python": platform.python_version(),
        "the version of NumPy": np.__version__,
        **{f"the environment variable {name}": os.environ.get(name, "not set") for name in VARIABLES},
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": str(
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.are_deterministic_algorithms_enabled()": str(torch.are_deterministic_algorithms_enabled()),
        "the byte order": sys.byteorder,
    }


def processor(device: torch.device | str) -> str:
    """Return the kind of processor that a rank computes on: the GPU's name, or the CPU's model and instruction set."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return f"{processor_model()} ({torch.backends.cpu.get_cpu_capability()})"


@cache
def sources_checksum() -> str:
    """Return a checksum of this package's own source files, whose version may be that of another commit."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    return short(
        checksum_of_blocks(part for file in files for part in (str(file.relative_to(root)).encode(), _read(file)))
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # removed meanwhile
        return b""


def _digest(facts: Facts) -> int:
    text = json.dumps(facts, sort_keys=True).encode()
    return int(checksum_of_blocks([text]).rpartition(":")[2][:15], 16)  # 60 bits, which an int64 also holds negated


def _gathered(mine: list[Any]) -> list[Any]:
    """Gather plain values of every rank, by rank, as JSON."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    longest = torch.tensor([len(text)])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = torch.full((int(longest),), ord(" "), dtype=torch.uint8)
    padded[: len(text)] = text
    every = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(every, padded)
    return [json.loads(bytes(each.tolist())) for each in every]


def _disagreements(hosts: list[str], every: list[dict[str, str]]) -> list[Disagreement]:
    found = []
    for name in dict.fromkeys(name for facts in every for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(every):
            ranks.setdefault(facts.get(name, "not known"), []).append(rank)
        if len(ranks) > 1:
            places = {
                value: (tuple(some), tuple(dict.fromkeys(hosts[rank] for rank in some)))
                for value, some in ranks.items()
            }
            found.append(Disagreement(name, places))
    return found


def _place(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {first_of(map(str, ranks))}"
    return f"{named} ({first_of(hosts, most=2)})"
