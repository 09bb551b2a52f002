from pathlib import Path

import pytest

from threefold.config import load_config, resolve

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_go_together(path: Path) -> None:
    config = resolve(load_config(path), vocab_size=8192)
    assert config.train.max_steps > config.optimizer.warmup_steps


def test_demo_runs_on_eight_processes_in_all_three_directions() -> None:
    parallel = load_config(next(path for path in EXAMPLES if path.stem == "demo")).parallel
    assert (parallel.dp, parallel.tp, parallel.pp) == (2, 2, 2)
