"""The rules of the house that no linter knows."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_FILE = 400
SLOW_TO_IMPORT = ("torch", "numpy", "tokenizers", "matplotlib", "yaml")


@pytest.mark.parametrize("folder", ["threefold", "tests"])
def test_files_are_short(folder: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths, f"no files under {folder}"
    assert {path: length for path, length in lengths.items() if length >= LONGEST_FILE} == {}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["data", "--help"], ["--version"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['threefold', *{arguments!r}]\n"
        "from threefold.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('imported:', *sorted(set({SLOW_TO_IMPORT!r}) & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1].strip() == "imported:"


def test_importing_the_package_starts_nothing() -> None:
    """No work at import: no threads, no process group, no files opened for writing."""
    script = (
        "import threading, threefold.launch.pool, threefold.launch.training, torch.distributed\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
