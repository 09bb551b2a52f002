"""Where the ranks of a local run, and the workers of a pool, listen: nowhere but on this host."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = """
import workers
from threefold.launch import spawn
if __name__ == "__main__":
    spawn(workers.listening, ({folder!r},), 4)
"""
POOL = """
import workers
from threefold.verify.worker_pool import WorkerPool
if __name__ == "__main__":
    with WorkerPool(4) as pool:
        pool.run(4, workers.listening_in_a_pool, {folder!r})
"""
NAMESPACE = """
set -e
ip link set lo up
ip addr add 10.77.0.1/32 dev lo
echo "127.0.0.1 localhost" > {hosts}
echo "10.77.0.1 node77" >> {hosts}
mount --bind {hosts} /etc/hosts
hostname node77
exec {python} {script}
"""


ONLY_IPV6 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec {python} {script}"
DOWN = "exec {python} {script}"


def in_namespace(script: Path, shell: str) -> subprocess.CompletedProcess[str]:
    """Run a script in network, mount and host-name namespaces that the shell command has set up."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")
    if subprocess.run(["unshare", "-Urmnu", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not permitted here")
    shell = shell.format(hosts=script.parent / "hosts", python=sys.executable, script=script)
    return subprocess.run(
        ["unshare", "-Urmnu", "sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        text=True,
        capture_output=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("script", "least"), [(RUN, 5), (POOL, 4)], ids=["run", "pool"])
def test_ranks_listen_on_loopback_whatever_the_name_of_the_host(tmp_path: Path, script: str, least: int) -> None:
    """In a namespace in which the host's name resolves to the address of a network, as it does in most clusters."""
    file = tmp_path / "running.py"
    file.write_text(script.format(folder=str(tmp_path)))
    ended = in_namespace(file, NAMESPACE)
    assert ended.returncode == 0, ended.stderr
    addresses = (tmp_path / "listening").read_text().split()
    assert len(addresses) >= least  # one or more of each rank, and the store's of a run
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.slow
def test_ranks_meet_where_the_host_has_only_ipv6(tmp_path: Path) -> None:
    file = tmp_path / "running.py"
    file.write_text(RUN.format(folder=str(tmp_path)))
    ended = in_namespace(file, ONLY_IPV6)
    assert ended.returncode == 0, ended.stderr
    assert set((tmp_path / "listening").read_text().split()) == {"::1"}


@pytest.mark.slow
def test_an_interface_that_is_down_is_told(tmp_path: Path) -> None:
    file = tmp_path / "running.py"
    file.write_text(RUN.format(folder=str(tmp_path)))
    ended = in_namespace(file, DOWN)
    assert ended.returncode == 1
    told = ended.stderr.splitlines()[-1]
    assert told.startswith(
        "threefold.errors.UserError: The ranks of a run meet on the loopback interface of their host"
    )
    assert "(127.0.0.1: network is unreachable; ::1: cannot assign requested address)" in told
    assert told.endswith("take the interface up with `ip link set lo up`.")
