"""Network interfaces and their addresses, and which of them each axis of a layout uses."""

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from threefold.comm.layout import AXES

_CLASS = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as `eth0`.
        address: of IPv4 or else IPv6; empty for none.
        megabits: per second, as its driver tells; 0 where it is not known.
    """

    name: str
    address: str
    megabits: int = 0

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gb/s" if self.megabits else ""
        return f"{self.name} ({self.address or 'no address'}{speed})"


@dataclass(frozen=True)
class AxisRoute:
    """Over what the ranks of an axis communicate.

    Attributes:
        axis: its name.
        here: between ranks of this host.
        hosts: between hosts.
    """

    axis: str
    here: str
    hosts: str


def interfaces() -> list[Interface]:
    """Those of this machine, in the system's order."""
    return [Interface(name, _address(name), _speed(name)) for _, name in socket.if_nameindex()]


def between_hosts(found: list[Interface]) -> Interface | None:
    """The interface that gloo takes between hosts: the one that its variable names, or that has the host's address."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        return next((each for each in found if each.name == named), Interface(named, ""))
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    own = next((each for each in found if each.address == address), None)
    return own or next((each for each in found if each.address and not _is_loopback(each)), None)


def axis_routes(device: str, found: list[Interface]) -> list[AxisRoute]:
    """For each axis of the mesh.

    Args:
        device: of the ranks, `cpu` or `cuda`.
        found: the interfaces.
    """
    outside = between_hosts(found)
    loopback = next((each for each in found if _is_loopback(each)), None)
    over = str(outside) if outside else "no interface has an address"
    if device == "cuda":
        adapters = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
        here = "NCCL over NVLink or PCIe"
        hosts = f"NCCL over InfiniBand or RoCE ({', '.join(adapters)})" if adapters else f"NCCL over {over}"
        return [AxisRoute(axis, here, hosts) for axis in (*AXES, "ep")]
    inside = {"ep": f"gloo over {loopback or over}"}
    return [AxisRoute(axis, inside.get(axis, "shared memory"), f"gloo over {over}") for axis in (*AXES, "ep")]


def _is_loopback(interface: Interface) -> bool:
    return bool(re.fullmatch(r"lo\d*", interface.name))


def _address(name: str) -> str:
    """By the system's answer to what an interface's address is (SIOCGIFADDR); IPv6 ones from /proc."""
    with suppress(ImportError, OSError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, own = line.split()
            if own == name:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def _speed(name: str) -> int:
    with suppress(OSError, ValueError):
        return max(0, int((_CLASS / name / "speed").read_text()))
    return 0
