"""Two hosts for a job: network namespaces that a pair of interfaces joins, each with process numbers of its own."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEADLINE = 60.0
"""Seconds until a process that was killed has ended."""


class NotAllowed(Exception):
    """This user may make no network namespaces here."""


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: of its end of the link to the other host.
        interface: that has the address.
    """

    name: str
    address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """A command that is run on this host, and ends with the process that starts it."""
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return ["ip", "netns", "exec", self.name, *own, *arguments]

    def processes(self) -> list[int]:
        """Of all commands that run on this host, as they are numbered outside."""
        return [int(word) for word in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all of them at once; returns when none is left."""
        deadline = time.monotonic() + DEADLINE
        while found := self.processes():
            assert time.monotonic() < deadline, f"processes {found} of {self.name} do not end"
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def disconnect(self) -> None:
        """Take its link down: nothing comes from it any more, nor that it is gone."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, which end with all that runs on them.

    Raises:
        NotAllowed: there cannot be any here.
    """
    hosts = tuple(Host(f"threefold-{os.getpid()}-{n}", f"10.213.0.{n + 1}", f"link{n}") for n in range(2))
    if not all(map(shutil.which, ("ip", "unshare"))):
        raise NotAllowed("ip and unshare are not installed")
    made = []
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                made.append(host)
            first, second = hosts
            ends = ("type", "veth", "peer", "name", second.interface, "netns", second.name)
            _ip("link", "add", first.interface, "netns", first.name, *ends)
            for host in hosts:
                _ip("-n", host.name, "address", "add", f"{host.address}/30", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.name, "link", "set", interface, "up")
                subprocess.run(host.command("true"), check=True, capture_output=True, timeout=DEADLINE)
        except subprocess.CalledProcessError as error:
            raise NotAllowed(f"{error}: {error.stderr}") from None
        yield first, second
    finally:
        for host in made:
            host.kill()
            _ip("netns", "delete", host.name)


def _ip(*arguments: str) -> str:
    ended = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE)
    return ended.stdout
