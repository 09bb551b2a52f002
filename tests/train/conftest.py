"""Text to train on."""

from pathlib import Path

import pytest

from tests.train.support import Run, write_tokens


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on one rank; `but` makes others of it."""
    from pydoc_data.topics import topics

    documents = [text[:400] for _, text in sorted(topics.items())][:60]
    return Run(write_tokens(Path(tmp_path_factory.mktemp("data")) / "tokens", documents))
