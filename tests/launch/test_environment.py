import pytest

from threefold.launch.environment import LaunchedRank, find_launched_rank, first_host, tasks_on

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
    assert find_launched_rank(TORCHRUN) == LaunchedRank(5, 8, 1, 4, "env://")


def test_slurm_step() -> None:
    port = 20_000 + (7000 * 31 + 2) % 10_000
    assert find_launched_rank(SLURM) == LaunchedRank(5, 6, 1, 2, f"tcp://gpu07:{port}?rank=5&world_size=6")


def test_every_rank_of_a_slurm_step_finds_the_same_meeting_point() -> None:
    places = [
        find_launched_rank({**SLURM, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 4)}) for rank in range(6)
    ]
    assert len({launched.rendezvous.split("?")[0] for launched in places if launched}) == 1


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
