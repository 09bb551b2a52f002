"""RUN/report.html: the page of a report, self-contained, and the callback that writes it at the end of a run."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from threefold.errors import UserError
from threefold.files import fill_page, json_in_script, shown
from threefold.output import replace_link
from threefold.report.document import report_of
from threefold.report.record import RunRecord
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say
from threefold.train.callbacks.console import REPORT_FILE


class RunReport(Callback):
    """Write the report of the whole run after its last step; if it cannot be written, say so."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_fit(self) -> None:
        path = self.folder / REPORT_FILE
        # A report that fails must not fail a finished run.
        try:
            record = RunRecord(self.folder, ended=True)
            record.update()
            replace_link(path).write_text(make_page(report_of([record])), encoding="utf-8")
        except Exception as error:
            say(f"Warning: {path} cannot be written ({reason_of(error)}).")


def make_page(document: Mapping[str, Any], poll: int = 0) -> str:
    """Return the HTML of a report, with its script, style and data inside; it loads nothing.

    Args:
        document: the report (`report_of`).
        poll: milliseconds after which the page asks its server for `report.json` again; 0 for a page that never asks.
    """
    parts = {
        "connect": "'self'" if poll else "'none'",
        "title": escape(", ".join(run["name"] for run in document["runs"])),
        "css": _part("page.css"),
        "poll": str(poll),
        "json": json_in_script(document),
        "js": _part("page.js"),
    }
    return fill_page(_part("page.html"), parts)


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page of a report to a file; raise a `UserError` if it cannot be written."""
    try:
        path.write_text(make_page(document), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {shown(path)} cannot be written: {error.strerror}.") from None


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
