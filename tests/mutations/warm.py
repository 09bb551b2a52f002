"""Runs Python modules as forks of this process, which has imported the libraries that they need.

Starting an interpreter and importing torch takes most of what a small test takes. The package itself is imported by
each fork anew.

Reads one request a line from standard input, and answers each with the process's number, then its exit status.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from tests.support.modules import module_names

PACKAGE, OURS = "threefold", ("threefold", "threefold_parity", "tests", "__main__")


def main() -> None:
    """Serve requests until standard input ends."""
    for name in _libraries():
        with suppress(Exception):  # some libraries make modules up that cannot be imported by their names
            importlib.import_module(name)
    gc.freeze()
    print(flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _run(request)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _libraries() -> list[str]:
    """Names of the modules that all of the package imports, its own left out; found by a fork, which imports it."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        importlib.import_module("pytest")
        for name in module_names(PACKAGE):
            importlib.import_module(name)
        found = (name for name in sys.modules if name.partition(".")[0] not in OURS)
        names = [name for name in found if hasattr(sys.modules[name], "__spec__")]
        with os.fdopen(writer, "w") as pipe:
            json.dump(names, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        names: list[str] = json.load(pipe)
    os.waitpid(child, 0)
    return names


def _run(request: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the one before is the pipe of requests
        sys.argv = ["", *request["arguments"]]
        sys.modules.pop("__main__", None)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
