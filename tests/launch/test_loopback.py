"""Where the ranks of a local run listen: nowhere but on this host."""

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


def test_ranks_listen_on_loopback_whatever_the_name_of_the_host(tmp_path: Path) -> None:
    """In a namespace in which the host's name resolves to the address of a network, as it does in most clusters."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")
    if subprocess.run(["unshare", "-Urmnu", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not permitted here")
    script = tmp_path / "running.py"
    script.write_text(RUN.format(folder=str(tmp_path)))
    shell = NAMESPACE.format(hosts=tmp_path / "hosts", python=sys.executable, script=script)
    ended = subprocess.run(
        ["unshare", "-Urmnu", "sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    addresses = (tmp_path / "listening").read_text().split()
    assert len(addresses) > 4  # the store's, and one or more of each rank
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
