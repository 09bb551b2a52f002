"""Two hosts for a job: network namespaces joined by a pair of interfaces, each with its own process ids."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEADLINE = 60.0
"""Seconds until a killed process has ended."""


class NotAllowed(Exception):
    """This user may not create network namespaces."""


@dataclass(frozen=True)
class Host:
    """Network namespace that acts as a host.

    Attributes:
        name: name of the namespace.
        address: address of its end of the link to the other host.
        interface: interface that has the address.
    """

    name: str
    address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs on this host and ends with the process that starts it."""
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return ["ip", "netns", "exec", self.name, *own, *arguments]

    def processes(self) -> list[int]:
        """Return the ids, as seen outside, of all processes on this host."""
        return [int(word) for word in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all processes of this host at once; return when none is left."""
        deadline = time.monotonic() + DEADLINE
        while found := self.processes():
            assert time.monotonic() < deadline, f"processes {found} of {self.name} do not end"
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def disconnect(self) -> None:
        """Take the link down: nothing arrives from this host any more, not even a closed connection."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts; end them with all their processes on exit.

    Raises:
        NotAllowed: this user may not create them here.
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
