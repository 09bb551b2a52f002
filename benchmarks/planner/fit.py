"""Fit the achievable fractions of a GPU type to published steps on it, and print them.

    python -m benchmarks.planner.fit a100-80 [TRIALS]

A random search that changes one or two constants at a time. A table weighs by the root of its number of steps, and a
step's error counts at most a quarter, so that stalls of single runs have no effect. Constants stay near what kernels
reach alone.
"""

import random
import sys
from collections import defaultdict
from dataclasses import replace
from math import log
from statistics import mean

from benchmarks.planner.rows import published_rows
from threefold.config import Config
from threefold.planner.estimate import step_time
from threefold.planner.hardware import Hardware, find_hardware
from threefold.planner.systems import System, find_system

EXPECTED = {
    "matrix": (0.8, 0.08),
    "matrix_depth": (200.0, 0.5),
    "attention": (0.6, 0.15),
    "attention_backward": (0.45, 0.25),
    "general_attention": (0.6, 0.3),
    "memory": (0.85, 0.08),
    "link": (0.6, 0.2),
    "network": (0.85, 0.1),
}
"""Expected value of each constant, from single kernels, and the share by which it may differ."""
_CONGESTED = "256 GPUs"  # part of the titles of one source's runs on a slow network
Step = tuple[str, Config, System, float]


def loss(hardware: Hardware, steps: list[Step]) -> float:
    """Return the mean error of the tables plus the distance of the constants from the expected ones."""
    tables: dict[str, list[float]] = defaultdict(list)
    for title, config, system, seconds in steps:
        tables[title].append(min(0.25, abs(step_time(config, hardware, system).seconds / seconds - 1)))
    weights = {title: len(errors) ** 0.5 for title, errors in tables.items()}
    error = sum(weights[title] * mean(errors) for title, errors in tables.items()) / sum(weights.values())
    reached = hardware.achievable
    far = sum((log(getattr(reached, name) / middle) / width) ** 2 for name, (middle, width) in EXPECTED.items())
    return error + 0.002 * far


def main() -> None:
    name, trials = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 150
    steps = [
        (row.title.split(":")[0], row.config(), find_system(row.system), row.seconds)
        for row in published_rows()
        if row.hardware == name and row.seconds is not None and _CONGESTED not in row.title
    ]
    hardware, draw, width = find_hardware(name), random.Random(1), 0.12
    best = loss(hardware, steps)
    print(f"{len(steps)} steps, loss {best:.4f}")
    for trial in range(trials):
        changed = {
            constant: min(getattr(hardware.achievable, constant) * (1 + draw.gauss(0, width)), 1e3)
            for constant in draw.sample(list(EXPECTED), draw.choice((1, 1, 2)))
        }
        fractions = {key: value if key == "matrix_depth" else min(1.0, value) for key, value in changed.items()}
        # The name distinguishes entries where kernels are cached.
        tried = replace(hardware, name=f"{name} {trial}", achievable=replace(hardware.achievable, **fractions))
        if (found := loss(tried, steps)) < best:
            best, hardware = found, tried
        width = max(0.02, width * 0.985)
    print(f"loss {best:.4f}:", {constant: round(getattr(hardware.achievable, constant), 3) for constant in EXPECTED})


if __name__ == "__main__":
    main()
