"""The page in a browser: it loads nothing, logs no error, fits a phone and a desk, and shows what runs recorded."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.browser import Open, overflow
from threefold.report.document import report_of, write_page
from threefold.report.live import RunServer
from threefold.report.record import RunRecord

pytestmark = pytest.mark.slow

Copied = Callable[[str], Path]
CHARTS = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Compute", "Time of a step", "Waiting", "Memory"]


def written(path: Path, *folders: Path) -> Path:
    records = [RunRecord(folder) for folder in folders]
    for record in records:
        record.update()
    write_page(path, report_of(records))
    return path


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_one_run_at_both_widths(page: Open, recorded: Path, tmp_path: Path, width: int, scheme: str) -> None:
    shown = page(written(tmp_path / "page.html", recorded), width, scheme)
    assert overflow(shown) <= 0
    titles = [
        each.split(" over ")[0] for each in shown.locator(".plot").evaluate_all("all => all.map(e => e.ariaLabel)")
    ]
    assert titles == CHARTS
    assert (
        shown.locator(".tiles b").first.inner_text()
        == report_of([_read(recorded)])["runs"][0]["summary"]["loss"].split()[0]
    )
    assert shown.locator(".layout rect[fill^='var']").count() == 4, "a cell for each rank"
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(245, 247, 249)" if scheme == "light" else "rgb(17, 22, 28)")


def _read(folder: Path) -> RunRecord:
    record = RunRecord(folder)
    record.update()
    return record


@pytest.mark.parametrize("width", [375, 1280])
def test_several_runs_over_one_another(page: Open, recorded: Path, copied: Copied, tmp_path: Path, width: int) -> None:
    other = copied("a-run-with-a-name-that-is-much-too-long-for-the-window-of-a-phone-or-a-column-of-a-table")
    config = other / "config.yaml"
    config.write_text(
        config.read_text().replace("  tp: 2\n", "  tp: 2\n  cp: 300\n").replace("  pp: 1\n", "  pp: 40\n")
    )
    (other / "samples.jsonl").write_text(json.dumps({"step": 6, "prompt": "<b>If</b>", "text": "x" * 2000}) + "\n")
    with (other / "train.log").open("a") as file:
        file.write(f"global step 4, stopped: {'because ' * 100}\n")
    with (other / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")
    shown = page(written(tmp_path / "page.html", recorded, other), width)
    assert overflow(shown) <= 0
    lines = shown.locator(".plot").first.locator("path[stroke='var(--run-1)']")
    assert lines.count() >= 2, "training and validation of the second run"
    shown.get_by_role("button", name=other.name).click()
    assert lines.count() == 0
    assert "hide=1" in shown.url
    assert shown.locator(".sample").count() == 0
    shown.get_by_role("button", name=other.name).click()
    assert shown.locator(".sample b").inner_text() == "<b>If</b>", "text, not elements"
    assert overflow(shown) <= 0


def test_values_under_the_pointer_and_by_keys(page: Open, recorded: Path, tmp_path: Path) -> None:
    shown = page(written(tmp_path / "page.html", recorded), 1280)
    losses = {line["step"]: line["loss"] for line in _lines(recorded) if "loss" in line}
    plot = shown.locator(".plot").first
    plot.focus()
    plot.press("ArrowLeft")
    tip = plot.locator(".tip div").first.inner_text()
    assert f"training {float(f'{losses[5]:.5g}')}" in tip
    assert "step 5" in tip
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + box["width"] - 11, box["y"] + 50)
    assert f"training {float(f'{losses[6]:.5g}')}" in plot.locator(".tip div").first.inner_text()
    assert not shown.locator(".plot").nth(1).locator(".tip").is_visible()
    assert shown.locator(".plot").nth(1).locator("g line").count() == 1, "the others mark the same place"


def _lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_smoothing_and_axes_stay_in_the_address(page: Open, copied: Copied, tmp_path: Path) -> None:
    folder = copied("long")
    lines = [
        {"step": step, "loss": 5 - step / 100, "tokens": 10, "tokens_per_second": 5.0, "seconds": 2.0}
        for step in range(1, 201)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line | {"wall_clock": 2.0 * line["step"]}) + "\n" for line in lines)
    )
    shown = page(written(tmp_path / "page.html", folder), 1280)
    assert shown.locator("nav output").inner_text() == "mean over 7 steps"
    shown.locator("#smoothing").fill("20")
    assert shown.locator("nav output").inner_text() == "mean over 41 steps"
    # A straight line's means are the line itself.
    assert shown.evaluate("smoothed([1, 2, 3, 4, 5, 6], 3)") == [None, 2, 3, 4, 5, None]
    assert shown.evaluate("smoothed([1, null, 3, 4], 3)") == [None, 2, 3.5, None]
    shown.locator("#axis").select_option("time")
    assert shown.evaluate("placesOf(report.runs[0]).at(-1)") == 400
    shown.locator("#axis").select_option("tokens")
    assert shown.evaluate("placesOf(report.runs[0]).at(-1)") == 2000
    shown.locator(".toggle").first.click()
    again = page(f"{shown.url}", 1280)
    state = again.evaluate("view")
    assert (state["axis"], state["smoothing"], state["log"]) == ("tokens", 20, ["loss"])


def test_a_run_without_steps_has_a_page(page: Open, copied: Copied, tmp_path: Path) -> None:
    folder = copied("young")
    for name in ("metrics.jsonl", "goodput.json", "config.yaml"):
        (folder / name).unlink()
    (folder / "run.lock").touch()
    shown = page(written(tmp_path / "page.html", folder), 375)
    assert shown.locator(".state").inner_text() == "ended before the first step"
    assert overflow(shown) <= 0


def test_a_served_page_follows_the_run(page: Open, copied: Copied) -> None:
    folder = copied("served")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0])
    server = RunServer(RunRecord(folder), 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        shown = page(f"http://127.0.0.1:{server.port}/", 1280)
        assert shown.locator(".state").inner_text() == "ended after step 1 of 6"
        path.write_text("".join(lines))
        shown.locator(".state.finished").wait_for()
    finally:
        server.close()
        thread.join()
