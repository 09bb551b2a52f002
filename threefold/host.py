"""Allocator and writeback settings for training on a CPU, and facts of the host."""

import ctypes
import errno
import fcntl
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for later allocations instead of returning it to the system.

    A step allocates and frees activations of some megabytes hundreds of times. By default each one is mapped, zeroed
    page by page and unmapped, which costs a sixth of a small model's step. No effect without glibc.
    """
    _tell_allocator({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> None:
    """Make the C library return every freed megabyte to the system at once.

    By default, glibc keeps the memory of large tensors freed after the first one, in pieces that later tensors
    do not fit. So a process that reads a model tensor by tensor grows to several times the memory that it uses.
    No effect without glibc.
    """
    _tell_allocator({_M_MMAP_THRESHOLD: 1 << 20})


def begin_writing(descriptor: int, start: int, size: int) -> None:
    """Start writing part of a file to disk without waiting; the data stays in the page cache.

    Leaving all of it to the final `fsync` slows a process to less than the disk's speed once much data is pending.
    Linux only; no effect elsewhere.
    """
    _sync_file_range(descriptor, start, size, 2)  # SYNC_FILE_RANGE_WRITE


def finish_writing(descriptor: int, start: int, size: int) -> None:
    """Wait until part of a file is on disk, so that `fsync` has little left to wait for.

    Linux only; no effect elsewhere or where the file system lacks support. Raises OSError for a failed write, which
    `fsync` does not report again.
    """
    failed = _sync_file_range(descriptor, start, size, 7)  # with WAIT_BEFORE and WAIT_AFTER
    if failed in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        raise OSError(failed, os.strerror(failed))


def _sync_file_range(descriptor: int, start: int, size: int, flags: int) -> int:
    """Return the error of the system call, 0 for none or where there is no such call."""
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return 0
    part = (ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(flags))
    return ctypes.get_errno() if call(*part) else 0


def _tell_allocator(options: dict[int, int]) -> None:
    with suppress(OSError, AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)


def usable_cores() -> int:
    """Return the number of cores that this process may use at once, by its affinity and the `cpu_quota`, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, cpu_quota()))


def cpu_quota() -> float:
    """Return how many cores' worth of time this process's control groups allow; infinity for no limit.

    Threads beyond it are stopped together for the rest of each period, so a rank that has them waits for itself.
    """
    return min(group_limits("cpu", _cores_of), default=math.inf)


def processor_vendor() -> str:
    """Return the processor's vendor (`GenuineIntel`, `AuthenticAMD`), or an empty string if unknown."""
    return _of_processor("vendor_id")


def processor_model() -> str:
    """Return the processor's model, such as `AMD EPYC 9B14`, or an empty string if unknown."""
    return _of_processor("model name")


def _of_processor(name: str) -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:
        # Only the first processor: the system takes a while to list hundreds.
        for line in file.read(4096).splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def exchange_paths(one: Path, other: Path) -> bool:
    """Swap two paths of one file system atomically; return whether it is supported, or raise OSError on failure."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if not rename(here, os.fsencode(one), here, os.fsencode(other), exchange):
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):  # not on this file system
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def memory(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this process's control group may use on this machine.

    Memory used by other programs is not subtracted, so a restarted run sees the same limit.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *map(int, group_limits("memory", _bytes_of, groups, root))])


def group_limits(
    controller: str,
    read: Callable[[Path], float],
    groups: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> list[float]:
    """Return the limits that `read` finds in the folders of a process's control group and of its parents.

    `groups` lists the process's groups of version 1, one for each controller, and of version 2.
    """
    limits = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # Version 1 may mount controllers together or apart; version 2 is mounted beside it on a host that has both.
            mounts = (root / controller, root / controllers) if controllers else (root, root / "unified")
            for mount in {*mounts}:
                here = mount / path.lstrip("/")
                for folder in (here, *here.parents):
                    if folder.is_relative_to(mount):
                        with suppress(OSError, ValueError):
                            limits.append(read(folder))
    return [limit for limit in limits if limit > 0]


def _bytes_of(group: Path) -> float:
    version_2 = group / "memory.max"
    return int((version_2 if version_2.exists() else group / "memory.limit_in_bytes").read_text())


def _cores_of(group: Path) -> float:
    version_2 = group / "cpu.max"
    if version_2.exists():
        quota, period = version_2.read_text().split()
    else:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / max(int(period), 1)  # a quota of "max" or -1 is none


def interface_address(name: str) -> str:
    """Return a network interface's IPv4 address (SIOCGIFADDR), or else its IPv6 address from /proc; "" for none."""
    import socket  # not for commands that use no network

    with suppress(OSError):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, interface = line.split()
            if interface == name:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""
