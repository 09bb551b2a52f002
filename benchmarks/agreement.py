"""Measure the exchange by which ranks compare what decides a run's numbers (`threefold.resilience.agreement`).

    python benchmarks/agreement.py [--ranks 2 8 64] [--rounds 30]

Ranks are processes of this host, over gloo on the loopback interface of a network namespace of their own, whose
counters show the bytes and packets of nothing else. Each rank compares the terms of a run of the default config. The
same with facts that differ on the last rank is measured too, which gathers all facts.

All ranks share the cores of this host, which takes most of the time. So the path of messages that wait for each other,
up the tree of ranks and down again, is measured too: two ranks send each other as many in turn, also for 1,024 ranks.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hardware import hardware_line

from threefold.config import resolve
from threefold.config.loading import config_of
from threefold.resilience.agreement import compare, facts_of_process
from threefold.resilience.terms import settings_of

SIMULATED = (8, 64, 1_024)
CONFIG = {"data": {"path": "tokens"}, "train": {"max_steps": 100, "global_batch_size": 1_024}}


def facts() -> dict[str, str]:
    return settings_of(resolve(config_of(CONFIG), 50_257)) | facts_of_process()


def traffic() -> tuple[int, int]:
    """Return the bytes and packets that the loopback interface has carried so far."""
    fields = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line).split()
    return int(fields[1]), int(fields[2])


def rank(number: int, ranks: int, store: str, rounds: int, report: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=number, world_size=ranks)
    mine = facts()
    for differs in (False, True):
        given = mine | ({"optimizer.lr": "0.5"} if differs and number == ranks - 1 else {})
        compare(given, {})  # connects, reads the sources
        times, before = [], traffic()
        for _ in range(rounds):
            started = time.perf_counter()
            found = compare(given, {})[0]
            times.append(time.perf_counter() - started)
            assert bool(found) == differs
        dist.barrier()
        if number == 0:
            size, packets = (after - start for after, start in zip(traffic(), before, strict=True))
            report.send((statistics.median(times), size / rounds / ranks, packets / rounds / ranks))
        dist.barrier()
    if ranks == 2:
        paths = [path(number, each, rounds) for each in SIMULATED]
        if number == 0:
            report.send(paths)
    dist.destroy_process_group()


def path(number: int, ranks: int, rounds: int) -> float:
    """Return the median seconds of as many messages in turn as the tree of `ranks` ranks has: four a level."""
    numbers, times, levels = torch.zeros(4, dtype=torch.int64), [], ranks.bit_length() - 1
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(2 * levels):
            for sender in range(2):
                (dist.send if sender == number else dist.recv)(numbers, 1 - number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(ranks: int, rounds: int) -> list[Any]:
    """Return median seconds, and bytes and packets a rank, of an exchange of equal facts and of different ones; of two
    ranks also the seconds of the simulated paths."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, str(Path(folder) / "store"), rounds, sender)
        processes = [context.Process(target=rank, args=(number, *args)) for number in range(ranks)]
        for process in processes:
            process.start()
        found = [receiver.recv() for _ in range(2 + (ranks == 2))]
        for process in processes:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:  # in a network namespace, where nobody else sends
        shell = 'ip link set lo up && exec "$@"'
        sys.exit(subprocess.call(["unshare", "-rn", "sh", "-c", shell, "sh", sys.executable, *sys.argv, "--inside"]))
    print(hardware_line())
    print(f"{len(facts())} facts; rounds: {options.rounds}")
    print("ranks   equal: ms   bytes a rank   packets a rank   one differs: ms   bytes a rank   packets a rank")
    for ranks in options.ranks:
        equal, different = measure(ranks, options.rounds)[:2]
        cells = [f"{ranks:5}"]
        for seconds, size, packets in (equal, different):
            cells += [f"{1e3 * seconds:11.2f}", f"{size:14,.0f}", f"{packets:16.1f}"]
        print(" ".join(cells), flush=True)
    for ranks, seconds in zip(SIMULATED, measure(2, options.rounds)[2], strict=True):
        print(f"the messages of {ranks:,} ranks that wait for each other: {1e3 * seconds:.2f} ms")


if __name__ == "__main__":
    main()
