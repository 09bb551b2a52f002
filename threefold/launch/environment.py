"""Find the rank of this process under torchrun or Slurm, and meet the other ranks at the store of a rendezvous.

Only this file reads the launchers' environment variables. torch waits for other ranks in native code, where Ctrl-C does
nothing; here ranks wait in short slices, so that signals work, and only up to a limit.
"""

import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.host import interface_address

if TYPE_CHECKING:
    from torch.distributed import Store

_SLURM_PORTS: Final = range(20_000, 30_000)
_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Command lines for messages, without the variables by which a rank of each launcher is found.
_TORCHRUN_ALONE: Final = "`env -u RANK -u WORLD_SIZE COMMAND`"
_SLURM_ALONE: Final = "`env -u SLURM_STEP_ID COMMAND`"


@dataclass(frozen=True)
class LaunchedRank:
    """Rank that a launcher started.

    Attributes:
        attempt, restarts: number of restarts by the launcher so far, and number that it allows.
        host, port: place of the rendezvous.
        hosted: whether the launcher itself listens there; otherwise rank 0 does.
        variables: text for messages that names the variables found, and how to start alone without them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    attempt: int = 0
    restarts: int = 0
    host: str = ""
    port: int = 0
    hosted: bool = False
    variables: str = field(default="", compare=False)


def find_launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the rank that torchrun or Slurm's srun gave this process; None if no launcher started it."""
    return _torchrun(environment) or _slurm(environment)


def missing_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the missing torchrun variables if some are set; empty without a launcher or with only one rank."""
    if not {"RANK", "WORLD_SIZE"} & environment.keys() or environment.get("WORLD_SIZE") == "1":
        return []
    return [name for name in _TORCHRUN if name not in environment]


def local_place(rank: int, world_size: int, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the launcher's local rank and local world size; those of the process group if it has set none."""
    most = _number(environment, "LOCAL_WORLD_SIZE", 1, None, world_size)
    return _number(environment, "LOCAL_RANK", 0, most - 1, rank), most


def chosen_threads(environment: Mapping[str, str] = os.environ, parent: int | None = None) -> int | None:
    """Return the threads of a rank that the user chose by OMP_NUM_THREADS; None if unset, no number or torchrun's own.

    torchrun sets it to 1 for several ranks of a host unless the user has set it. Which of them did shows only in the
    environment in which torchrun was started: the nearest ancestor's, from `parent` on, without torchrun's variables.
    """
    found = re.fullmatch(r"\s*0*([1-9][0-9]{0,3})\s*(,.*)?", environment.get("OMP_NUM_THREADS", ""))
    if found is None:
        return None
    if found[1] == "1" and "TORCHELASTIC_RUN_ID" in environment and environment.get("LOCAL_WORLD_SIZE") != "1":
        pid = parent or os.getppid()
        try:
            while b"TORCHELASTIC_RUN_ID" in (given := _environment_of(pid)):
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # not Linux, or another user's
            return None
        if b"OMP_NUM_THREADS" not in given:
            return None
    return int(found[1])


def _environment_of(pid: int) -> set[bytes]:
    """Return the names of the variables with which a process was started."""
    return {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}


def leave_to_first_rank() -> None:
    """Leave an error that all ranks of a host have to its first rank: on the others, wait while it prints, then exit.

    They wait because some launchers end every rank as soon as one has ended. The first ranks of hosts other than that
    of rank 0 wait too, as they usually have its error, and print their own if nothing has ended them by then. A rank
    whose variables were set by hand may be alone, and prints the error itself.
    """
    try:
        launched = find_launched_rank()
    except UserError:  # the error to print, or another one
        return
    if launched is None or launched.rank == 0:
        return
    if set(_TORCHRUN) <= os.environ.keys() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    time.sleep(5.0)  # while rank 0 prints an error that all ranks have
    if launched.local_rank:
        sys.exit(2)


def tell_waiting_ranks(error: str) -> None:
    """Tell ranks that wait at the rendezvous for this one that it has ended with an error of its own.

    Only this node may have it, as with a config that differs; the others would wait until their limit. One that does
    not listen yet, as it imports torch, has `NOTICE` seconds to do so.
    """
    with suppress(Exception):  # this process ends with its own error in any case
        launched = find_launched_rank()
        if launched is None or launched.world_size == 1 or (launched.rank == 0 and not launched.hosted):
            return
        place, deadline = (launched.host, launched.port), time.monotonic() + NOTICE
        while True:
            try:
                socket.create_connection(place, _PROBE).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(_SLICE)
        import torch.distributed as dist

        with held_back_errors():
            options: dict[str, Any] = {"wait_for_workers": False}
            found = dist.TCPStore(*place, launched.world_size, False, timedelta(seconds=_PROBE), **options)
            store = _store_of(launched, found)
            store.set(_ENDED, f"rank {launched.rank} ({socket.gethostname()}) has ended: {error.removesuffix('.')}")


def _torchrun(environment: Mapping[str, str]) -> LaunchedRank | None:
    if not set(_TORCHRUN) <= environment.keys():
        return None
    world_size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0, world_size - 1)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size, world_size)
    local_rank = _number(environment, "LOCAL_RANK", 0, local_world_size - 1)
    host = environment["MASTER_ADDR"]
    if not host.strip():
        raise _wrong(environment, "MASTER_ADDR", "the name or address of the host of rank 0", "localhost")
    attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0, None, 0)
    restarts = _number(environment, "TORCHELASTIC_MAX_RESTARTS", 0, None, 0)
    port = _number(environment, "MASTER_PORT", 1, 65_535)
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    variables = f"RANK={rank} and WORLD_SIZE={world_size} are set, which {_TORCHRUN_ALONE} is without"
    place = (rank, world_size, local_rank, local_world_size)
    return LaunchedRank(*place, attempt, restarts, host, port, hosted, variables)


def _slurm(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank of a Slurm task; None in the shell of a batch script or of an interactive step."""
    if "SLURM_STEP_ID" not in environment:
        return None
    tasks_variable = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = _number(environment, tasks_variable, 1, None, 1)
    if world_size == 1:
        return None
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    needed = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID")
    missing = [name for name in needed if name not in environment] + ([] if hosts else ["SLURM_STEP_NODELIST"])
    if missing or not hosts:
        raise UserError(
            f"SLURM_STEP_ID and {tasks_variable}={world_size} say that this is a task of a Slurm job step, but there "
            f"is no {' and no '.join(missing)}; start the ranks with srun, which sets all of them, or run alone with "
            f"{_SLURM_ALONE}."
        )
    step = _number(environment, "SLURM_JOB_ID", 0) * 31 + _number(environment, "SLURM_STEP_ID", 0)
    rank = _number(environment, "SLURM_PROCID", 0, world_size - 1)
    here = world_size
    per_node = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if tasks := next((each for each in per_node if environment.get(each)), ""):
        try:
            here = tasks_on(environment[tasks], _number(environment, "SLURM_NODEID", 0, None, 0))
        except ValueError:
            raise _wrong(environment, tasks, "tasks of each node, such as 4(x2),3", str(world_size)) from None
    local_rank, port = _number(environment, "SLURM_LOCALID", 0, world_size - 1), _SLURM_PORTS[step % len(_SLURM_PORTS)]
    variables = f"SLURM_PROCID={rank} and {tasks_variable}={world_size} are set, which {_SLURM_ALONE} is without"
    return LaunchedRank(rank, world_size, local_rank, here, host=first_host(hosts), port=port, variables=variables)


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int | None = None, default: int | None = None
) -> int:
    """Return a launcher's variable as an integer, `default` if unset; raise `UserError` outside `least` to `most`."""
    if name not in environment and default is not None:
        return default
    text = environment.get(name, "")
    # Stricter than `int`: launchers write digits only, and Python refuses to read thousands of them.
    value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) else None
    if value is not None and value >= least and (most is None or value <= most):
        return value
    rule = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if most == least:
        rule = str(least)
    if name in ("RANK", "SLURM_PROCID") and value is not None:
        rule += f", as there {'is 1 rank' if most == 0 else f'are {(most or 0) + 1:,} ranks'}"
    nearest = least if value is None or value < least else most
    raise _wrong(environment, name, rule, str(nearest))


def _wrong(environment: Mapping[str, str], name: str, rule: str, nearest: str) -> UserError:
    launcher, alone = ("srun", _SLURM_ALONE) if name.startswith("SLURM") else ("torchrun", _TORCHRUN_ALONE)
    text = environment.get(name, "")
    value = shown(text) if text.strip() else "empty"
    return UserError(
        f"The environment variable {name} is {value} but must be {rule}; set it to {nearest}, start the ranks with "
        f"{launcher}, which sets it, or run alone with {alone}."
    )


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list: `gpu[03-07,9]-ib,other` gives `gpu03-ib`."""
    match = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\])?([^,]*)", hosts)
    assert match  # every part may be empty
    return "".join(part or "" for part in match.groups())


def tasks_on(tasks_per_node: str, node: int) -> int:
    """Return the tasks on one node of a Slurm list, where `4(x2),3` is 4, 4, 3; raise `ValueError` for other text."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part)
        if match is None or int(match[1]) < 1:
            raise ValueError(f"{part!r} is not a number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


PATIENCE: Final = 4
"""Number of timeouts that a rank may take to meet the others (under a launcher it may still prepare its data), and for
one computation."""
MEETING_LIMIT: Final = 1800.0
"""Seconds that ranks may take to meet if no setting says how long; torch's default."""
NOTICE: Final = 5.0
"""Seconds of waiting after which a rank prints what it waits for."""
_SLICE: Final = 0.2  # seconds between two checks
_PROBE: Final = 5.0  # seconds within which a host must answer
_MOST_NAMED: Final = 4  # most ranks that a message lists one by one
_ENDED: Final = "ended"  # key of a store: why a rank will not come


def meet(launched: LaunchedRank, timeout: float = 0.0) -> "Store":
    """Connect to the rendezvous and wait until all ranks have; return the store of this attempt.

    A launcher may keep its store when it restarts ranks. They have `PATIENCE` times `timeout` (`train.timeout`) to
    arrive, or `MEETING_LIMIT` if that is 0; then a `UserError` is raised.
    """
    wait = _Wait(launched, timeout)
    found: Any = _connected(wait)
    found.set_timeout(timedelta(seconds=MEETING_LIMIT))
    store = _store_of(launched, found)
    if launched.world_size > 1:
        _wait_for_others(wait, store)
        reach_other_hosts(launched.host)
    return store


def reach_other_hosts(host: str) -> None:
    """Make gloo listen on the interface that reaches `host`, where this host's own name has no address to reach it at.

    By default gloo listens on the address of the host's name, and on loopback if there is none. Debian gives the name a
    loopback address, which other hosts cannot reach either. torch 2.13 passes no options to gloo, so only the
    environment variable sets this; one that the user has set stays.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)}
        if any(not each.startswith("127.") and each != "::1" for each in addresses):
            return
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(place)  # sends nothing
            address = asking.getsockname()[0]
        if name := next((each for _, each in socket.if_nameindex() if interface_address(each) == address), ""):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _store_of(launched: LaunchedRank, found: "Store") -> "Store":
    """Return the part of a launcher's store that belongs to this attempt."""
    import torch.distributed as dist

    return dist.PrefixStore(f"threefold/{launched.attempt}", found)


class _Wait:
    """Waiting time of a rank, with a notice on `console` (a descriptor of standard error) and a limit."""

    console = 2

    def __init__(self, launched: LaunchedRank, timeout: float) -> None:
        self.launched, self._timeout = launched, timeout
        self._limit = PATIENCE * timeout or MEETING_LIMIT
        self._begun, self._told = time.monotonic(), False

    def look(self, whom: Callable[[], str], seconds: float = _SLICE) -> None:
        """Wait for a slice; after `NOTICE` seconds print once for `whom`, and at the limit raise `UserError`."""
        waited = time.monotonic() - self._begun
        if waited >= self._limit:
            why = f"{PATIENCE} times train.timeout" if self._timeout else "the limit"
            raise self.error(f"{whom()} within {self._limit:g} s ({why})")
        if waited >= NOTICE and not self._told:
            self._told = True
            with suppress(OSError):
                os.write(self.console, f"Waiting: {self.error(f'{whom()} yet')}.\n".encode())
        time.sleep(min(seconds, max(self._limit - waited, 0.01)))

    def error(self, what: str) -> UserError:
        launched = self.launched
        host = f"[{launched.host}]" if ":" in launched.host else launched.host
        return UserError(
            f"rank {launched.rank} of {launched.world_size:,} is at its rendezvous {host}:{launched.port} "
            f"but {what}; {launched.variables}: start all ranks, or this one alone without these variables"
        )


def _connected(wait: _Wait) -> "Store":
    """Return the store of the rendezvous: start it on the rank that hosts it, connect to it on the others.

    Runs in a thread, because native code may wait forever for an answer.
    """
    import torch.distributed as dist

    launched = wait.launched
    made: list[Any] = []
    failure: list[Exception] = []
    hosts = launched.rank == 0 and not launched.hosted
    over = threading.Event()

    def make() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        while not over.is_set():
            try:
                place, within = (launched.host, launched.port), timedelta(seconds=_PROBE)
                if not hosts:
                    socket.create_connection(place, _PROBE).close()
                options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
                with held_back_errors():  # without waiting for the others, which torch would do in native code
                    made.append(dist.TCPStore(*place, launched.world_size, hosts, within, **options))
                return
            except Exception as error:
                failure[:] = [error]
                if hosts:
                    return
            over.wait(_SLICE)

    thread = threading.Thread(target=make, name="rendezvous", daemon=True)
    with suppress(OSError):
        wait.console = os.dup(2)
    thread.start()
    try:
        thread.join(_SLICE / 4)
        while not made:
            if not thread.is_alive() and failure and not made:
                raise wait.error(f"cannot listen there ({_reason(failure[0])})")
            wait.look(lambda: "nothing there answers" + (f" ({_reason(failure[0])})" if failure else ""), _SLICE / 4)
    finally:
        over.set()
        if wait.console != 2:  # the thread may still hold back output
            os.dup2(wait.console, 2)
            os.close(wait.console)
            wait.console = 2
    return made[0]


def _wait_for_others(wait: _Wait, store: "Store") -> None:
    """Return when all ranks have reached the store."""
    rank, size = wait.launched.rank, wait.launched.world_size

    def absent() -> str:
        with held_back_errors():
            ranks = [each for each in range(size) if store.add(f"come/{each}", 0) <= meeting]
        return f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not come"

    pause, longest = 0.005, max(_SLICE, size / 2000)  # so many checks of the store a second, by all ranks together
    try:
        with held_back_errors():
            if (known := store.compare_set("world", "", str(size)).decode()) != str(size):
                what = f"rank {rank} ({socket.gethostname()}) is one of {size:,} ranks there and others are of {known}"
                store.set(_ENDED, what)
                raise wait.error(f"{what}, as with another number of nodes")
            came = store.add(f"come/{rank}", 1)
            if came > store.add("come", 0) // size + 1:
                store.add(f"come/{rank}", -1)
                raise wait.error(f"another process is rank {rank} there, as of another run with this address and port")
            number = store.add("come", 1)
            meeting = (number - 1) // size  # a launcher's store may have been used before
            everyone = f"come/all/{meeting}"
            if number % size == 0:
                store.set(everyone, "")
        while True:
            with held_back_errors():
                if store.check([everyone]):
                    return
                ended = store.get(_ENDED).decode() if store.check([_ENDED]) else ""
            if ended:
                raise UserError(f"Not all ranks can start, as {ended}.")
            wait.look(absent, pause)
            pause = min(2 * pause, longest)
    except RuntimeError as error:  # the process that listens there has ended
        raise wait.error(f"the connection to it is lost ({_reason(error)})") from None


def named_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 1`, `ranks 1, 2 and 5` or `ranks 1, 2, 3, 4 and 60 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, more = list(ranks[:_MOST_NAMED]), len(ranks) - _MOST_NAMED
    if more == 1:
        shown, more = list(ranks), 0
    *most, last = [*map(str, shown), *([f"{more:,} more"] if more > 0 else [])]
    return f"ranks {', '.join(most)} and {last}"


def _reason(error: Exception) -> str:
    """Return the system's reason for an error, without frames of native code."""
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error).partition("\n")[0].rpartition("message: ")[2].rstrip(".")


@contextmanager
def held_back_errors() -> Iterator[None]:
    """Hold back what native code writes to standard error in the block; show it afterwards unless the block raises.

    torch writes C++ frames before it raises the same error.
    """
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (OSError, ValueError, AttributeError):  # closed
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        with suppress(OSError):
            os.write(2, file.read())
