"""`init_mesh`: every query on every rank of several layouts, the ways to start, and its errors."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import threefold
from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.comm.layout import Layout

AXES = ("dp", "pp", "cp", "tp")


def queries(sizes: dict[str, int]) -> dict[str, Any]:
    """What the mesh of this rank answers."""
    mesh = threefold.init_mesh(**sizes)
    found: dict[str, Any] = {"rank": mesh.rank, "first": mesh.is_first_stage, "last": mesh.is_last_stage}
    for name in (*AXES, "ep"):
        axis = getattr(mesh, name)
        found[name] = (axis.index, axis.size, axis.first, axis.last, axis.previous, axis.next, axis.ranks)
    check = mesh.check_group
    found["check"] = check.ranks
    found["agreed"] = check.all_reduce_max_(torch.tensor([float(mesh.rank)])).item()
    return found


def rank_at(sizes: dict[str, int], **place: int) -> int:
    """Row-major over (dp, pp, cp, tp)."""
    rank = 0
    for name in AXES:
        rank = rank * sizes.get(name, 1) + place[name]
    return rank


def ring(ranks: list[int], rank: int) -> tuple[Any, ...]:
    index, size = ranks.index(rank), len(ranks)
    before, after = ranks[(index - 1) % size], ranks[(index + 1) % size]
    return index, size, ranks[0], ranks[-1], before, after, tuple(ranks)


def table(sizes: dict[str, int]) -> dict[int, dict[str, Any]]:
    """The expected answers of each rank, by the row-major formula alone."""
    expected: dict[int, dict[str, Any]] = {}
    ep = sizes.get("ep", 1)
    for place in (dict(zip(AXES, at, strict=True)) for at in product(*(range(sizes.get(name, 1)) for name in AXES))):
        rank = rank_at(sizes, **place)
        mine: dict[str, Any] = {
            name: ring([rank_at(sizes, **{**place, name: i}) for i in range(sizes.get(name, 1))], rank) for name in AXES
        }
        neighbours = range(place["dp"] // ep * ep, place["dp"] // ep * ep + ep)
        mine["ep"] = ring([rank_at(sizes, **{**place, "dp": dp}) for dp in neighbours], rank)
        others = product(neighbours, *(range(sizes.get(name, 1)) for name in AXES[1:]))
        mine["check"] = tuple(rank_at(sizes, **dict(zip(AXES, at, strict=True))) for at in others)
        mine["agreed"] = float(max(mine["check"]))
        mine |= {"rank": rank, "first": place["pp"] == 0, "last": place["pp"] == sizes.get("pp", 1) - 1}
        expected[rank] = mine
    return expected


LAYOUTS = [
    {"dp": 2, "tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "cp": 2},
    {"dp": 4, "tp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "tp": 2, "ep": 2},
    {"pp": 4, "cp": 2},
    {"dp": 3, "tp": 2},
    {"dp": 8},
    {"dp": 1},
]


@sweep("sizes", LAYOUTS, ids=str, quick=(0, 1, 2))
def test_every_query_on_every_rank(pool, sizes: dict[str, int]) -> None:
    expected = table(sizes)
    assert sorted(expected) == list(range(len(expected)))
    for rank, found in enumerate(pool.run(len(expected), queries, sizes)):
        assert found == expected[rank]


def test_a_row_of_the_table_by_hand(pool) -> None:
    """dp 2 · pp 2 · tp 2: rank 5 is replica 1, stage 0, tensor rank 1."""
    found = pool.run(8, queries, {"dp": 2, "tp": 2, "pp": 2})[5]
    assert found["tp"] == (1, 2, 4, 5, 4, 4, (4, 5))
    assert found["pp"] == (0, 2, 5, 7, 7, 7, (5, 7))
    assert found["dp"] == (1, 2, 1, 5, 1, 1, (1, 5))
    assert found["check"] == (4, 5, 6, 7)
    assert (found["first"], found["last"]) == (True, False)


def layout_of(sizes: dict[str, int]) -> str:
    return str(threefold.init_mesh(**sizes).layout)


def test_dp_fills_the_world(pool) -> None:
    assert pool.run(6, layout_of, {"tp": 2})[0] == "dp 3 · tp 2 · pp 1"
    assert pool.run(6, layout_of, {"pp": 3})[0] == "dp 2 · tp 1 · pp 3"
    assert pool.run(4, layout_of, {"cp": 2})[0].startswith("dp 2 ·")


def twice(first: dict[str, int], second: dict[str, int]) -> str:
    threefold.init_mesh(**first)
    return sentence(threefold.init_mesh, **second) or layout_of(second)


def test_a_second_call_gives_the_same_layout(pool) -> None:
    assert pool.run(2, twice, {"tp": 2}, {"tp": 2}) == ["dp 1 · tp 2 · pp 1"] * 2
    assert pool.run(2, twice, {"tp": 2}, {"dp": 2})[0] == (
        "init_mesh is called with dp 2 · tp 1 · pp 1 on rank 0 and was called with dp 1 · tp 2 · pp 1 before; the "
        "ranks have one layout: give the same in every call and on every rank."
    )


def refusal(sizes: dict[str, Any]) -> str:
    return sentence(threefold.init_mesh, **sizes)


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (4, {"tp": 3}, "The world has 4 ranks, not a multiple of tp · pp = 3; start 3 ranks."),
    (4, {"dp": 4, "tp": 2}, "The layout dp 4 · tp 2 · pp 1 needs 8 ranks but the world has 4; set dp to 2 or start 8 "),
    (2, {"tp": 0}, "tp is 0 but must be at least 1; use 1."),
    (2, {"dp": 0}, "dp is 0 but must be at least 1; use 1."),
    (2, {"tp": 2.0}, "tp is 2.0 but must be a whole number of ranks; use tp=1."),
    (2, {"dp": 2, "ep": 4}, "ep is 4 but must divide dp 2; use 2."),
]


@pytest.mark.parametrize(("ranks", "sizes", "sentence"), REFUSED, ids=[sentence for *_, sentence in REFUSED])
def test_wrong_sizes_are_one_sentence(pool, ranks: int, sizes: dict[str, Any], sentence: str) -> None:
    found = pool.run(ranks, refusal, sizes)[0]
    assert found.startswith(sentence)
    assert found.count(". ") == 0


def test_a_layout_needs_its_model_groups() -> None:
    assert Layout(dp=4, pp=2, ep=2).model_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


SCRIPT = """
import sys, threefold, torch
from threefold.errors import UserError
try:
    mesh = threefold.init_mesh({arguments})
    found = f"{{mesh.rank}} {{mesh.layout}} {{mesh.world.all_reduce_(torch.ones(1)).item()}}"
except UserError as error:
    found = str(error)
sys.stdout.write(found + "\\n")  # at once: under torchrun `print` writes each part by itself
"""


def run_script(folder: Path, arguments: str, environment: dict[str, str], *launcher: str) -> list[str]:
    script = folder / "loop.py"
    script.write_text(SCRIPT.format(arguments=arguments))
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, env={**cleared, **environment}, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.slow
def test_alone_it_is_one_rank(tmp_path: Path) -> None:
    assert run_script(tmp_path, "", {}) == ["0 dp 1 · tp 1 · pp 1 1.0"]


@pytest.mark.slow
def test_alone_a_larger_layout_names_the_launchers(tmp_path: Path) -> None:
    assert run_script(tmp_path, "tp=2", {}) == [
        "The layout dp 1 · tp 2 · pp 1 needs 2 ranks but this process is alone; start it with `torchrun "
        "--nproc-per-node 2 SCRIPT.py`, or call threefold.run(FUNCTION, ranks=2)."
    ]


@pytest.mark.slow
def test_half_of_a_launchers_variables_is_an_error(tmp_path: Path) -> None:
    (line,) = run_script(tmp_path, "", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})
    assert line.startswith("The environment has a rank of a launcher but no LOCAL_RANK and no MASTER_PORT; start ")


@pytest.mark.slow
def test_under_torchrun_the_ranks_meet(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run_script(tmp_path, "tp=2", {}, *launcher) == ["0 dp 1 · tp 2 · pp 1 2.0", "1 dp 1 · tp 2 · pp 1 2.0"]


@pytest.mark.slow
def test_under_slurm_the_ranks_meet(tmp_path: Path) -> None:
    """Two tasks of a step, with the variables that srun sets."""
    common = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT.format(arguments="dp=2"))
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [task.communicate(timeout=300)[0] for task in tasks] == [
        f"{rank} dp 2 · tp 1 · pp 1 2.0\n" for rank in range(2)
    ]
