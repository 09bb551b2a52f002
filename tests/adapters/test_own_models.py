"""Adapters of models of one's own in every layout, against one process."""

from pathlib import Path

from tests.support.sweep import sweep
from tests.verify.support import task, verify
from threefold.config.loading import config_of
from threefold.verify.verifier import EQUAL

LAYOUTS = ("dp2·tp2", "tp2·pp2", "pp4", "dp2 zero3", "tp3", "dp4 zero1", "pp2 zbv")


@sweep("name", ["Tuned", "WithMagnitudes"], slow=(0, 1))
def test_layouts_are_equal(pool, tmp_path: Path, name: str) -> None:
    given = config_of(
        {
            "data": {"path": "nowhere", "sequence_length": 8},
            "model": {"file": f"tests/adapters/own_models.py:{name}", "vocab_size": 67},
            "train": {"global_batch_size": 24, "max_steps": 3},
            "optimizer": {"lr": 3e-3, "clip_grad_norm": 0.5},
        }
    )
    for result in verify(pool, task(*LAYOUTS, given=given), tmp_path, *LAYOUTS):
        assert result.verdict == EQUAL, (str(result.spec), result.first, result.message, result.details)
        trained = [each for each, _ in result.by_parameter if each.endswith("lora_magnitude")]
        assert bool(trained) == (name == "WithMagnitudes")
