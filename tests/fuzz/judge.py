"""Reading damaged folders in a process of its own, which may hang, crash or run out of memory without harm."""

import multiprocessing
import resource
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError

PATIENCE: Final = 60.0
"""Seconds after which a reader counts as hanging; it takes a fraction of one."""
_STARTING: Final = 600.0
"""Seconds after which a process must have begun its reading; the first time it imports torch and the reader before."""
_MEMORY: Final = 4 << 30
"""Bytes of address space that a reader may ask for beyond what its process has at the start."""
_LONGEST: Final = 1200

Reader = Callable[[Path], str]
"""Reads all that a folder holds as the program would, and returns a digest of what it understood."""


@dataclass(frozen=True)
class Verdict:
    """What became of a reading: "read" with its digest, "refused" with its sentence, or what must never be."""

    kind: str
    text: str


class Judge:
    """Reads folders in another process, which is started anew when it was lost.

    Args:
        patience: seconds that a reading may take, not counting the start of the process.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._process: Any = None
        self._pipe: Any = None

    def ask(self, read: Reader, folder: Path) -> Verdict:
        """What becomes of reading `folder`; `read` can be pickled."""
        if self._process is None:
            context: Any = multiprocessing.get_context("spawn")  # this process may have run torch's threads
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send((read, folder))
        try:
            for step, seconds in (("begun", _STARTING), ("answered", self._patience)):
                if not self._pipe.poll(seconds):
                    self.close()
                    return Verdict("hung", f"has not {step} within {seconds:.0f} s")
                message = self._pipe.recv()
            return Verdict(*message)
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.close()
            return Verdict("crashed", f"exit status {code}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    while True:
        try:
            read, folder = pipe.recv()
        except EOFError:
            return
        pipe.send("begins")
        try:
            verdict = ("read", read(folder))
        except UserError as error:
            verdict = ("refused", str(error))
        except BaseException:
            verdict = ("traceback", traceback.format_exc())
        pipe.send(verdict)


@dataclass(frozen=True)
class Finding:
    """A damage that was not dealt with as it must be."""

    damage: str
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.damage}: {self.verdict.kind}\n    {self.verdict.text[-1500:]}"


def examine(
    judge: Judge,
    read: Reader,
    whole: Path,
    scratch: Path,
    damages: Iterable[Callable[[Path], str]],
    may_differ: Callable[[str], bool],
) -> tuple[list[Finding], Counter[str]]:
    """Damage copies of the folder `whole`, read each, and return what went wrong and how often each verdict came.

    Args:
        judge: does the reading.
        read: what it reads with.
        whole: undamaged.
        scratch: an empty folder, where the copies are made under the name of `whole`.
        damages: each damages the folder that it is given and says what it did.
        may_differ: whether a damage, as told, may be read as something else than what `whole` holds: in files that
            nothing but their own content describes, whatever fits together is what they hold.
    """
    found: list[Finding] = []
    counts: Counter[str] = Counter()
    expected = judge.ask(read, _copied(whole, scratch))
    assert expected.kind == "read", expected
    for damage in damages:
        folder = _copied(whole, scratch)
        done = damage(folder)
        verdict = judge.ask(read, folder)
        kind = verdict.kind
        if kind == "read":
            same = verdict.text == expected.text
            kind = "read the same" if same else "read as something else"
            if not same and not may_differ(done):
                found.append(Finding(done, verdict))
        elif kind != "refused" or "\n" in verdict.text or not 0 < len(verdict.text) <= _LONGEST:
            found.append(Finding(done, verdict))
        counts[kind] += 1
    return found, counts


def _copied(whole: Path, scratch: Path) -> Path:
    folder = scratch / whole.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder, symlinks=True)
    return folder
