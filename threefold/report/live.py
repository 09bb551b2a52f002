"""A run that goes on: two lines in a terminal, or the page of its report on the loopback interface."""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.report.console import RunningLines
from threefold.report.curves import sparkline
from threefold.report.document import make_page, report_of, sentence_of, steps_of
from threefold.report.record import RunRecord, number
from threefold.train.callbacks.base import on_terminal, say
from threefold.train.callbacks.records import EvaluationRecord, Performance, StepRecord

POLL: Final = 2000
"""Milliseconds after which a served page asks again."""
LOOPBACK: Final = "127.0.0.1"


def follow(run: RunRecord, pause: Callable[[], None]) -> None:
    """Print the newest step of a run until it ends: two lines in place on a terminal, a line for each change elsewhere.

    The lines are those of a run (`RunningLines`), and a sparkline of the loss with its first and last value. `pause` is
    called between two readings of the run.
    """
    steps, lines, drawn = steps_of(run.settings()[0]), None, 0
    while True:
        goes_on = run.is_running  # asked first, so that the last lines of a run that ends now are not missed
        if run.update() and run.recent:
            if lines is None or steps is None:
                lines = RunningLines(steps or run.curves.last_step)
            if run.evaluation is not None:
                loss = _or_nan(number(run.evaluation, "valid_loss"))
                lines.evaluation(EvaluationRecord(run.evaluation["step"], loss, 0, 0.0))
            newest = lines.step([_step(line) for line in run.recent])
            if on_terminal():
                drawn = _draw([newest, loss_line(run)], drawn)
            else:
                say(newest)
        if not goes_on:
            break
        pause()
    if not on_terminal() and run.recent:
        say(loss_line(run))
    say(f"{shown(run.folder)}: {sentence_of(run, steps)}.")


def loss_line(run: RunRecord) -> str:
    """Return the curve of the training loss as a sparkline with its first and last value, and the goodput."""
    means = run.curves.means("loss")
    ends = f"loss {means[0]:.4f} → {means[-1]:.4f}" if means else "no finite loss"
    found = run.goodput
    return "  ".join(filter(None, (sparkline(means), ends, f"goodput {found.fraction:.1%}" if found else "")))


def _draw(lines: list[str], drawn: int) -> int:
    """Write lines over the last `drawn` ones, cut to the width of the terminal; return how many they are."""
    width = shutil.get_terminal_size().columns - 1
    begin = f"\x1b[{drawn}F" if drawn else ""
    sys.stdout.write(begin + "".join(f"\x1b[K{line[:width]}\n" for line in lines))
    sys.stdout.flush()
    return len(lines)


def _step(line: Mapping[str, Any]) -> StepRecord:
    """Return the record of a step of which metrics.jsonl has a line; what the file does not say is 0."""
    seconds = number(line, "seconds") or 1e-9  # of a line that lacks it
    rate, memory = number(line, "tflops"), int(number(line, "memory") or 0)
    used = None
    if memory:
        used = Performance(
            flops_per_second=None if rate is None else rate * 1e12,
            mfu=number(line, "mfu"),
            memory=memory,
            largest_memory=int(number(line, "largest_memory") or memory),
            largest_rank=int(number(line, "largest_rank") or 0),
            waited=number(line, "waited") or 0.0,
            wall_clock=number(line, "wall_clock") or 0.0,
        )
    return StepRecord(
        step=line["step"],
        loss=_or_nan(number(line, "loss")),
        grad_norm=_or_nan(number(line, "grad_norm")),
        lr=number(line, "lr") or 0.0,
        tokens=int(number(line, "tokens") or 0),
        tokens_read=round((number(line, "tokens_per_second") or 0.0) * seconds),
        epoch=0,
        batch=0,
        reader_cost=0.0,
        seconds=seconds,
        loss_scale=number(line, "loss_scale"),
        performance=used,
    )


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


class RunServer:
    """Server of a run's report on the loopback interface: the page at `/`, its document at `/report.json`.

    It answers nothing else, so that no file of this machine can be read through it; nor requests that name another
    host, which a browser sends where the name of a foreign page was made to lead here. The port 0 is any that is free.
    """

    def __init__(self, run: RunRecord, port: int) -> None:
        self._run, self._lock, server = run, threading.Lock(), self
        self._state: tuple[Any, ...] = ()
        self._report: dict[str, Any] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, kind, content = server.answer(self.path, self.headers.get("Host", ""))
                self.send_response(status)
                headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
                headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:
            raise UserError(
                f"--serve {port} cannot be used ({error.strerror}); use --serve 0, for any port that is free."
            ) from None
        self._server.daemon_threads, self.port = True, int(self._server.server_address[1])

    def serve(self) -> None:
        """Answer requests until `close` is called or an exception, as Ctrl-C raises it, ends it."""
        try:
            self._server.serve_forever()
        finally:
            self._server.server_close()

    def close(self) -> None:
        """End `serve`, from another thread."""
        self._server.shutdown()

    def answer(self, path: str, host: str) -> tuple[int, str, bytes]:
        """Return the status, media type and content of the answer to a request."""
        if host not in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"):
            return 403, "text/plain", b"Only for this machine.\n"
        if path == "/":
            return 200, "text/html", make_page(self._document(), POLL).encode()
        if path == "/report.json":
            return 200, "application/json", json.dumps(self._document(), allow_nan=False).encode()
        return 404, "text/plain", b"There is / and /report.json.\n"

    def _document(self) -> dict[str, Any]:
        """Return the document, which is made again only if the run has changed."""
        with self._lock:
            is_new = self._run.update()
            checkpoints = self._run.folder / "checkpoints"
            state = (self._run.is_running, checkpoints.stat().st_mtime_ns if checkpoints.is_dir() else 0)
            if is_new or state != self._state or not self._report:
                self._state, self._report = state, report_of([self._run])
            return self._report
