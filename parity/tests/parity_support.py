"""The command as a user calls it, ranks of a process group, records with other facts, and marks of long lists."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist

from threefold_parity.files import TensorFile, checksum, save_tensors, seal
from threefold_parity.placement import whole
from threefold_parity.record import IndexEntry, page_file
from threefold_parity.sketch import Detail, Kept, keep


def parity(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command in a folder; commands of the arguments find this Python first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "threefold_parity", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def on_ranks(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function on the ranks of a new process group, each a process with one thread."""
    store = Path(mkdtemp(), "store")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "threefold_parity.recorder", "threefold_parity.compare"])
    ranks = [
        context.Process(target=_as_rank, args=(rank, count, store, function, arguments), daemon=True)
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * count


def _as_rank(rank: int, count: int, store: Path, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def sweep(
    names: str | Sequence[str],
    values: Iterable[Any],
    quick: Collection[int] = (),
    slow: Collection[int] = (),
    **more: Any,
) -> Any:
    """Return `pytest.mark.parametrize` with marks: cases at `quick` have none, those at `slow` slow, others sweep."""
    marked = [
        pytest.param(
            *(value if isinstance(names, tuple) else (value,)),
            marks=() if at in quick else pytest.mark.slow if at in slow else pytest.mark.sweep,
        )
        for at, value in enumerate(values)
    ]
    return pytest.mark.parametrize(names, marked, **more)


def kept_of(tensor: torch.Tensor, detail: Detail) -> Kept:
    """Return what a record keeps of a tensor that one rank holds whole."""
    shape = tuple(tensor.shape)
    found = Kept.empty(shape, detail)
    (piece,) = whole(tensor).pieces
    found.add(piece, keep(tensor[None], shape, piece, detail)[0])
    return found


def rewrite(record: Path, without: tuple[str, ...] = (), **facts: object) -> None:
    """Change facts of rank 0 of a record."""
    path = record / "rank-00000.json"
    left_out = ("checksum", *without)
    before = {name: value for name, value in json.loads(path.read_text()).items() if name not in left_out}
    path.write_text(json.dumps(seal({**before, **facts})))


def rewrite_index(record: Path, **fields: object) -> None:
    """Change the last entry of a record's first page, with the right checksum."""
    path = record / page_file(0, 0)
    file = TensorFile(path)
    index, values = json.loads(file.facts["index"]), file.tensor("values")
    index[-1] = IndexEntry.from_json(index[-1])._replace(**fields)  # type: ignore[arg-type]
    save_tensors(path, {"values": values}, {"index": json.dumps(index)})
    checksums = json.loads((record / "rank-00000.json").read_text())["checksums"]
    rewrite(record, checksums=[checksum(path), *checksums[1:]])
