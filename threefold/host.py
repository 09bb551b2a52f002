"""Settings of the C library and of files for training on a CPU, and this host's cores and memory."""

import ctypes
import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # <malloc.h>
_WRITE, _WRITE_AND_WAIT = 2, 7  # SYNC_FILE_RANGE_WRITE of <fcntl.h>, and with both WAIT_BEFORE and WAIT_AFTER
_FAILED_WRITES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <stdio.h>


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next allocation instead of giving it back to the system.

    Activations of some megabytes are allocated and freed hundreds of times in a step; by default each one is mapped,
    zeroed page by page and unmapped again, a sixth of the time of a small model's step. Does nothing without glibc.
    """
    _tell_allocator({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> None:
    """Have the C library give each freed megabyte back to the system at once.

    By default it learns from the first large tensor that is freed to keep the next ones, in pieces that fit none that
    follow, so a process that reads a model tensor by tensor grows to several times what it holds. Does nothing without
    glibc.
    """
    _tell_allocator({_M_MMAP_THRESHOLD: 1 << 20})


def begin_writing(descriptor: int, start: int, size: int) -> None:
    """Have the system write a part of a file to the disk, without waiting for it, and keep it in its cache.

    A process that leaves this to its last `fsync` is slowed down once much is waiting to be written, to less than the
    disk's speed. Does nothing but on Linux.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        call = ctypes.CDLL(None).sync_file_range
        call(ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_WRITE))


def finish_writing(descriptor: int, start: int, size: int) -> None:
    """Wait until the system has written a part of a file to the disk, so that `fsync` has little left to wait for.

    Does nothing but on Linux, and where the file system cannot.

    Raises:
        OSError: it could not be written, which `fsync` does not report again.
    """
    if sys.platform != "linux":
        return
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except AttributeError:
        return
    part = (ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(size))
    if call(*part, ctypes.c_uint(_WRITE_AND_WAIT)) and (failure := ctypes.get_errno()) in _FAILED_WRITES:
        raise OSError(failure, os.strerror(failure))


def _tell_allocator(options: dict[int, int]) -> None:
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_vendor() -> str:
    """Who made the processor: `GenuineIntel`, `AuthenticAMD`; empty where the system does not tell."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:
        # The first processor's lines alone: the system takes a while to write those of hundreds.
        for line in file.read(4096).splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return ""


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange two paths of one file system atomically, if the system supports that.

    Raises:
        OSError: one does not exist, or may not be moved.
    """
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):  # not on this file system
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def memory() -> int:
    """Bytes of this machine's memory that the processes of this one's control group may have together.

    Memory in use by other programs is not subtracted, so that a restarted run has the same limit as before.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def swap() -> int:
    """Bytes of this machine's swap space; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0


def peak_memory() -> int:
    """Bytes of memory that this process has had resident at most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _group_limits(groups: Path, root: Path) -> list[int]:
    """The memory limits of a process's control group and of those around it.

    Args:
        groups: the file that names its groups, of version 1 or 2.
        root: where they are mounted.
    """
    limits = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, name = root, "memory.max"
            elif "memory" in controllers.split(","):
                mount, name = root / "memory", "memory.limit_in_bytes"
            else:
                continue
            own = mount / path.lstrip("/")
            limits += [_limit(folder / name) for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    return [limit for limit in limits if limit]


def _limit(file: Path) -> int:
    """The number of bytes in a file; 0 where there is none."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
