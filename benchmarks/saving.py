"""Measure saving and loading of checkpoints beside `dd`, and the cost of saving to the steps.

    python benchmarks/saving.py [--rounds 5] [--hidden 512] [--folder .]

Two ranks train a GPT. The contestants take turns, and medians of the ratios of the turns are printed.

- `dd` copies as many bytes from memory to the same disk and waits until they are on it (`conv=fsync`); `save` also
  computes checksums. Before `dd` reads a file to nowhere, and before a checkpoint is loaded, the system drops the
  cached pages; loading compares the checksums.
- The stall of a save is the time that the training loop spends in it. *Slowdown* is what a save adds to all steps until
  it is on disk, background work included, on a CPU whose cores the training uses too.
- Loading in another layout: a checkpoint of two tensor-parallel ranks, loaded by them and by two ranks in another
layout.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shape
import torch
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import save_checkpoint
from threefold.checkpoint.tensors import load_tensors
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.host import keep_freed_memory
from threefold.launch import spawn
from threefold.launch.worker import RankInfo
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.resilience.background_saving import BackgroundSaver
from threefold.train.state import engine_tensors
from threefold.train.step import Engine

RANKS, BATCH = 2, 4
LAYOUTS = {"tp 2": {"tp": 2}, "pp 2": {"pp": 2}, "dp 2, ZeRO 1": {"dp": 2, "zero": 1}, "dp 2": {"dp": 2}}
SAVED_BY = "tp 2"
SPEED_GOAL, STALL_GOAL, LAYOUT_GOAL = 0.7, 0.10, 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--hidden", type=int, default=512, help="size of the model")
    parser.add_argument("--folder", type=Path, default=Path("."), help="a folder on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        found = spawn(measure, (Path(name), arguments.rounds, arguments.hidden), RANKS)
    assert isinstance(found, dict)
    console = Console()
    size = found.pop("bytes")
    console.print(f"hidden {arguments.hidden}, {size / 1e6:,.0f} MB, {RANKS} ranks\n{hardware_line()}", highlight=False)
    console.print(table(found, size))


class Trained:
    """Engine in one layout, and its state."""

    def __init__(self, hidden: int, layout: dict[str, int]) -> None:
        settings = config_of(hidden, layout)
        parallel = settings.parallel
        self.mesh = Mesh(Layout.from_config(parallel), torch.device("cpu"))
        self.engine = Engine(lambda: GPT(settings.model), gpt_plan(settings.model, shape.SEQUENCE), self.mesh, settings)
        share = BATCH // parallel.dp
        self.rows = torch.arange(self.mesh.dp.index * share, (self.mesh.dp.index + 1) * share)
        self.step(0)

    def step(self, number: int) -> None:
        tokens = shape.global_batch(number)[self.rows]
        self.engine.train_step(Batch(tokens, tokens.roll(-1, 1), self.rows), number)

    def tensors(self) -> dict[str, torch.Tensor]:
        return engine_tensors(self.engine)


def config_of(hidden: int, layout: dict[str, int]) -> Config:
    sections: dict[str, Any] = shape.config("fp32").given()
    sections["model"] |= {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden}
    sections["parallel"] = layout
    sections["train"] |= {"global_batch_size": BATCH, "micro_batch_size": BATCH // layout.get("dp", 1)}
    if "pp" in layout:
        sections["train"]["micro_batch_size"] = BATCH // 2
    return resolve(Config.model_validate(sections), shape.VOCAB)


def measure(info: RankInfo, folder: Path, rounds: int, hidden: int) -> dict[str, Any]:
    keep_freed_memory()
    trained = Trained(hidden, LAYOUTS[SAVED_BY])
    world = trained.mesh.world
    found: dict[str, Any] = {}

    def save(step: int) -> Path:
        return save_checkpoint(folder, facts(step), trained.tensors(), {}, world)

    path = save(1)
    found["bytes"] = sum(file.stat().st_size for file in path.glob("tensors-*.bin"))
    source, target = Path("/dev/shm") / folder.name, folder / "dd"
    if world.is_first:
        source.write_bytes(b"".join(file.read_bytes() for file in sorted(path.glob("tensors-*.bin"))))
    copy = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    try:
        found["save"] = in_turns(
            world, rounds, first_does(world, copy), lambda: save(2), lambda: clear(world, folder / "dd", path, 2)
        )
    finally:
        source.unlink(missing_ok=True)
    whole = folder / "whole"
    if world.is_first:
        with whole.open("wb") as file:
            for part in sorted(path.glob("tensors-*.bin")):
                file.write(part.read_bytes())
            os.fsync(file.fileno())
    world.barrier()
    read = ["dd", f"if={whole}", "of=/dev/null", "bs=4M", "status=none"]
    files = [whole, *path.iterdir()]
    same = trained.tensors()
    found["load"] = in_turns(
        world,
        rounds,
        first_does(world, read),
        lambda: load_tensors(same, path),
        lambda: None,
        lambda: forget(files),
    )
    found |= stalls(trained, folder, rounds)
    for name, layout in LAYOUTS.items():
        if name != SAVED_BY:
            other = Trained(hidden, layout).tensors()
            found[f"load {name}"] = in_turns(
                world,
                rounds,
                lambda: load_tensors(same, path),
                lambda other=other: load_tensors(other, path),  # type: ignore[misc]
                lambda: None,
                lambda: forget(files),
            )
    return found


def stalls(trained: Trained, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds in a synchronous and an asynchronous save, and those that each adds to the steps beside it."""
    world, saver = trained.mesh.world, BackgroundSaver(trained.mesh)
    tensors = trained.tensors()
    number = 10

    def steps(count: int, until: Callable[[], bool] = lambda: True) -> int:
        nonlocal number
        made = 0
        while made < count or not agreed(world, until()):
            number, made = number + 1, made + 1
            trained.step(number)
        return made

    def save_beside() -> None:
        saver.save(folder, facts(number), tensors, {})

    save_beside()  # the first allocates the memory and creates the process group
    saver.wait()
    waits, copies, slow_sync, slow_async = [], [], [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        save_beside()
        copies.append(time.perf_counter() - begun)
        made = steps(2, lambda: saver.is_done)
        saver.wait()
        beside = time.perf_counter() - begun
        begun = time.perf_counter()
        steps(made)
        alone = time.perf_counter() - begun
        begun = time.perf_counter()
        save_checkpoint(folder, facts(number), tensors, {}, world)
        waits.append(time.perf_counter() - begun)
        steps(made)
        slow_sync.append(time.perf_counter() - begun - alone)
        slow_async.append(beside - alone)
        if world.is_first:
            shutil.rmtree(folder / "checkpoints" / "step_00000002", ignore_errors=True)
    saver.end()
    return {"stall": list(zip(waits, copies, strict=True)), "slowdown": list(zip(slow_sync, slow_async, strict=True))}


def in_turns(
    world: Any,
    rounds: int,
    one: Callable[[], object],
    other: Callable[[], object],
    after: Callable[[], object],
    before: Callable[[], object] = lambda: None,
) -> list[tuple[float, float]]:
    """Return the seconds of both, in turns, without the first turn of each."""
    found = []
    for _ in range(rounds + 1):
        seconds = []
        for work in (one, other):
            before()
            world.barrier()
            begun = time.perf_counter()
            work()
            world.barrier()
            seconds.append(time.perf_counter() - begun)
            after()
        found.append((seconds[0], seconds[1]))
    return found[1:]


def first_does(world: Any, command: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True) if world.is_first else None


def agreed(world: Any, mine: bool) -> bool:
    """Return whether all ranks agree."""
    return int(world.all_reduce_(torch.tensor(int(mine)))) == world.size


def clear(world: Any, copied: Path, path: Path, step: int) -> None:
    if world.is_first:
        copied.unlink(missing_ok=True)
        shutil.rmtree(path.with_name(f"step_{step:08d}"), ignore_errors=True)
        os.sync()
    world.barrier()


def forget(files: list[Path]) -> None:
    """Make the system drop cached pages of files."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def facts(step: int) -> Facts:
    return Facts(step, 0, 0, eod=None, tokenizer_sha256=None, tokens=0, documents=0)


def table(found: dict[str, list[tuple[float, float]]], size: int) -> Table:
    shown = Table(title="Checkpoints", title_justify="left")
    for heading in ("", "seconds", "beside", "ratio", "goal"):
        shown.add_column(heading, justify="right" if heading else "left")

    def row(name: str, values: list[tuple[float, float]], ratio: list[float], goal: str) -> None:
        beside, own = (statistics.median(column) for column in zip(*values, strict=True))
        shown.add_row(name, f"{own:.2f}", f"{beside:.2f}", f"{statistics.median(ratio):.2f}", goal)

    row("save, beside dd with fsync", found["save"], [dd / own for dd, own in found["save"]], f"≥ {SPEED_GOAL}")
    written = [(dd, own) for (dd, _), (_, own) in zip(found["save"], found["load"], strict=True)]
    row("load, beside dd with fsync", written, [dd / own for dd, own in written], f"≥ {SPEED_GOAL}")
    row("load, beside dd to nowhere", found["load"], [dd / own for dd, own in found["load"]], "")
    stall = found["stall"]
    row("stall of an asynchronous save, beside a synchronous", stall, [b / a for a, b in stall], f"≤ {STALL_GOAL}")
    slow = found["slowdown"]
    row("slowdown of the steps by it, beside the same", slow, [b / a for a, b in slow], "")
    for name, values in found.items():
        if name.startswith("load "):
            row(f"{name}, beside {SAVED_BY}", values, [b / a for a, b in values], f"≤ {LAYOUT_GOAL}")
    return shown


if __name__ == "__main__":
    main()
