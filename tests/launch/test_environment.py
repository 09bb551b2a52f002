import os
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.launch import worker
from threefold.launch.environment import LaunchedRank, chosen_threads, find_launched_rank, first_host, tasks_on

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SLURM = {
    "SLURM_JOB_ID": "7000",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
}


def test_no_launcher() -> None:
    assert find_launched_rank({"HOME": "/root", "RANK": "3"}) is None


def test_torchrun() -> None:
    assert find_launched_rank(TORCHRUN) == LaunchedRank(5, 8, 1, 4, host="a", port=1)


def test_slurm_step() -> None:
    port = 20_000 + (7000 * 31 + 2) % 10_000
    assert find_launched_rank(SLURM) == LaunchedRank(5, 6, 1, 2, host="gpu07", port=port)


def test_every_rank_of_a_slurm_step_finds_the_same_meeting_point() -> None:
    places = [
        find_launched_rank({**SLURM, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 4)}) for rank in range(6)
    ]
    assert len({(launched.host, launched.port) for launched in places if launched}) == 1


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert find_launched_rank({**SLURM, **TORCHRUN}) == find_launched_rank(TORCHRUN)


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"])
def test_slurm_shell_is_no_rank(missing: str) -> None:
    """A batch script's shell is in no step, an interactive one is alone in its step; both may start local workers."""
    assert find_launched_rank({key: value for key, value in SLURM.items() if key != missing}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-07,9]", "gpu03"),
        ("a[5,9]-ib,b2", "a5-ib"),
        ("c12-[001-004]", "c12-001"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3)])
def test_tasks_on(node: int, tasks: int) -> None:
    assert tasks_on("4(x2),3", node) == tasks


BY_HAND = "or run alone with `env -u RANK -u WORLD_SIZE COMMAND`."
IN_A_STEP = "or run alone with `env -u SLURM_STEP_ID COMMAND`."


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "abc"}, "RANK is abc but must be a whole number from 0 to 7; set it to 0, "),
        ({"RANK": ""}, "RANK is empty but must be a whole number from 0 to 7; set it to 0, "),
        ({"RANK": "1e9999"}, "RANK is 1e9999 but must be a whole number from 0 to 7; "),
        ({"RANK": "8"}, "RANK is 8 but must be a whole number from 0 to 7, as there are 8 ranks; set it to 7, "),
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK is 3 but must be 0, as there is 1 rank; set it to 0, "),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0 but must be a whole number of at least 1; set it to 1, "),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is 9999"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1 but must be a whole number from 0 to 3; set it to 0, "),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is 4 but must be a whole number from 0 to 3; set it to 3, "),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9 but must be a whole number from 1 to 8; set it to 8, "),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty but must be the name or address of the host of rank 0; "),
        (
            {"MASTER_PORT": "99999"},
            "MASTER_PORT is 99999 but must be a whole number from 1 to 65535; set it to 65535, ",
        ),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is x but must be a whole number of at least"),
        ({"SLURM_STEP_NUM_TASKS": "abc"}, "SLURM_STEP_NUM_TASKS is abc but must be a whole number of at least 1; "),
        ({"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "0"}, "SLURM_NTASKS is 0 but must be a whole number of at least"),
        ({"SLURM_PROCID": "6"}, "SLURM_PROCID is 6 but must be a whole number from 0 to 5, as there are 6 ranks; "),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is x but must be a whole number of at least 0; "),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE is two but must be tasks of each node, such"),
    ],
)
def test_what_a_launcher_never_sets_is_refused(variables: dict[str, str], sentence: str) -> None:
    given, launcher, alone = (TORCHRUN, "torchrun", BY_HAND)
    if sentence.startswith("SLURM"):
        given, launcher, alone = (SLURM, "srun", IN_A_STEP)
    with pytest.raises(UserError) as raised:
        find_launched_rank({**given, **variables})
    assert str(raised.value).startswith(f"The environment variable {sentence}")
    assert str(raised.value).endswith(f"start the ranks with {launcher}, which sets it, {alone}")


def test_a_step_without_its_other_variables_is_refused() -> None:
    with pytest.raises(UserError) as raised:
        find_launched_rank({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"})
    assert str(raised.value) == (
        "SLURM_STEP_ID and SLURM_NTASKS=2 say that this is a task of a Slurm job step, but there is no SLURM_JOB_ID "
        "and no SLURM_PROCID and no SLURM_LOCALID and no SLURM_STEP_NODELIST; start the ranks with srun, which sets "
        "all of them, or run alone with `env -u SLURM_STEP_ID COMMAND`."
    )


@pytest.mark.parametrize("tasks", ["2", "abc", ""])
def test_a_batch_script_may_have_any_number_of_tasks(tasks: str) -> None:
    assert find_launched_rank({"SLURM_JOB_ID": "1", "SLURM_NTASKS": tasks}) is None


def test_a_lone_step_is_alone() -> None:
    assert find_launched_rank({"SLURM_STEP_ID": "0"}) is None


@pytest.mark.parametrize(
    ("text", "threads"), [("3", 3), ("4,2", 4), ("1", 1), ("", None), ("0", None), ("-2", None), ("many", None)]
)
def test_threads_that_the_user_chose(text: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_threads({"OMP_NUM_THREADS": text}) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(worker, "usable_cores", lambda: 20)
    assert worker.threads_per_rank(2) == (threads or 10)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("at_start", "threads"), [("OMP_NUM_THREADS=1", 1), ("OTHER=1", None)])
def test_one_thread_may_be_the_choice_of_torchrun(at_start: str, threads: int | None) -> None:
    """A script between torchrun and the rank has torchrun's variables, and the parent of it all has none."""
    rank = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    script = "export OMP_NUM_THREADS=1 TORCHELASTIC_RUN_ID=none; sleep 60 & echo $!; read end; kill $!"
    command = ["env", "-i", at_start, "/bin/sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        assert chosen_threads(rank, int(launcher.stdout.readline())) == threads
        assert chosen_threads(rank | {"LOCAL_WORLD_SIZE": "1"}, launcher.pid) == 1  # torchrun sets nothing then
        launcher.communicate("end")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["1", "3", None])
def test_threads_under_torchrun(given: str | None, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nfrom threefold.launch.environment import chosen_threads\n"
        "sys.stdout.write(f'{chosen_threads()} {os.environ[\"OMP_NUM_THREADS\"]}\\n')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    chosen = {"OMP_NUM_THREADS": given} if given else {}
    ended = subprocess.run(command, env=environment | chosen, capture_output=True, text=True, timeout=120)
    assert ended.stdout == f"{given} {given or 1}\n" * 2, ended.stderr
