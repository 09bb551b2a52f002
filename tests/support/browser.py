"""Pages in headless Chromium, which may load nothing and log nothing.

Tests are skipped without Chromium (`apt install chromium`) or playwright (`pip install -e '.[browser]'`). All share one
browser, as playwright starts once in a process.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NO_BROWSER = "no headless browser: `apt install chromium` and `pip install -e '.[browser]'`"

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser of Debian's package `chromium`, driven by playwright."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        pytest.skip(NO_BROWSER)
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Open]:
    """Open a page: `page(path, width)` for a file, or for an address, whose own server it may ask.

    The test fails at the end if a page wrote to the console, raised an error, or asked for anything else.
    """
    problems: list[str] = []
    contexts = []

    def open_page(path: Path | str, width: int, scheme: str = "light") -> Any:
        address = path.resolve().as_uri() if isinstance(path, Path) else path
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        made = contexts[-1].new_page()
        own = urlsplit(address)[:2] if address.startswith("http") else None

        def check(url: str) -> None:
            parts = urlsplit(url)
            if url != address.partition("#")[0] and parts.scheme != "data" and (own is None or parts[:2] != own):
                problems.append(f"asks for {url}")

        made.on("request", lambda request: check(request.url))
        made.on("pageerror", lambda error: problems.append(f"raises {error}"))
        made.on("console", lambda said: problems.append(f"logs {said.text}"))
        made.goto(address)
        return made

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def overflow(opened: Any) -> int:
    """Pixels by which a page is wider than its window."""
    return int(opened.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
