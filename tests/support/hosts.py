"""Two hosts of a test: network namespaces with names of their own, linked by a cable; no root is needed.

As a script, `hosts.py PID MODULE ARGUMENTS...` runs a module on the host that process PID keeps, for `support.ready`.
"""

import ctypes
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEADLINE: Final = 60.0
"""Seconds until a killed process has ended, or a command of the set-up."""
_SPACES: Final = ("user", "net", "uts")


class NotAllowed(Exception):
    """This user may not create network namespaces."""


@dataclass(frozen=True)
class Host:
    """Network namespace that acts as a host.

    Attributes:
        name: name of the host.
        address: address of its end of the cable to the other host.
        interface: interface that has the address.
        keeper: process that keeps the namespaces.
    """

    name: str
    address: str
    interface: str
    keeper: int

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs on this host and ends with the process that starts it."""
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return [*_inside(self.keeper), *own, *arguments]

    def module(self, *arguments: str) -> list[str]:
        """Return a command for `support.ready` that runs a module on this host."""
        return [sys.executable, __file__, str(self.keeper), *arguments]

    def processes(self) -> list[int]:
        """Return the ids, as seen outside, of all processes on this host but its keeper."""
        mine, found = os.readlink(f"/proc/{self.keeper}/ns/net"), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended, or another user's
                if os.readlink(folder / "ns/net") == mine and int(folder.name) != self.keeper:
                    found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """Kill all processes of this host at once; return when none is left."""
        deadline = time.monotonic() + DEADLINE
        while found := self.processes():
            assert time.monotonic() < deadline, f"processes {found} of {self.name} do not end"
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def ip(self, *arguments: str) -> None:
        """Call `ip` there, such as `link set link0 down`."""
        _run(*_inside(self.keeper), "ip", *arguments)

    def disconnect(self) -> None:
        """Take the link down: nothing arrives from this host any more, not even a closed connection."""
        self.ip("link", "set", self.interface, "down")

    def connect(self) -> None:
        """Take the link up again."""
        self.ip("link", "set", self.interface, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts; end them with all their processes on exit.

    Raises:
        NotAllowed: this user may not create them here.
    """
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        raise NotAllowed("ip, unshare and nsenter are not installed")
    with ExitStack() as stack:
        names = [f"node{n}" for n in range(2)]
        try:
            # The second one's namespaces belong to the first one's user, which may thus link the two.
            first = stack.enter_context(_kept(("unshare", "-Urnu"), names[0]))
            second = stack.enter_context(_kept((*_inside(first), "unshare", "-nu"), names[1]))
            one, two = hosts = tuple(
                Host(name, f"10.213.0.{n + 1}", f"link{n}", keeper)
                for n, (name, keeper) in enumerate(zip(names, (first, second), strict=True))
            )
            one.ip("link", "add", one.interface, "type", "veth", "peer", "name", two.interface, "netns", str(second))
            for host in hosts:
                host.ip("address", "add", f"{host.address}/30", "dev", host.interface)
                for interface in ("lo", host.interface):
                    host.ip("link", "set", interface, "up")
                _run(*host.command("true"))
        except subprocess.CalledProcessError as error:
            raise NotAllowed(f"{error}: {error.stderr}") from None
        for host in hosts:
            stack.callback(host.kill)
        yield one, two


@contextmanager
def _kept(new: tuple[str, ...], name: str) -> Iterator[int]:
    """Keep namespaces that the command `new` makes; yield the id of the process that keeps them."""
    shell, pipe = f"hostname {name} && echo $$ && exec cat", subprocess.PIPE  # which ends with this process
    with subprocess.Popen([*new, "sh", "-c", shell], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as kept:
        try:
            pid = kept.stdout.readline() if kept.stdout else ""
            if not pid:
                raise subprocess.CalledProcessError(kept.wait(), new, stderr=kept.stderr and kept.stderr.read())
            yield int(pid)
        finally:
            kept.kill()


def _inside(keeper: int) -> tuple[str, ...]:
    return ("nsenter", "--preserve-credentials", "-t", str(keeper), *(f"--{space}" for space in _SPACES))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE)


def _enter(keeper: str) -> None:
    """Move this process, which has one thread, into the namespaces that `keeper` keeps."""
    spaces = [os.open(f"/proc/{keeper}/ns/{space}", os.O_RDONLY) for space in _SPACES]
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)


if __name__ == "__main__":
    _enter(sys.argv[1])
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
