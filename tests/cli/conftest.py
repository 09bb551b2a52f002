"""A config that trains a tiny model."""

from pathlib import Path

import pytest

from tests.cli.runs import write_config


@pytest.fixture
def config_file(tmp_path: Path, tokens: Path) -> Path:
    """A config that trains a tiny model on `tokens` for four steps."""
    return write_config(tmp_path, tokens)
