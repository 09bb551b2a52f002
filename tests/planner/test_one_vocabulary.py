"""What an estimate and a dry run tell of the peak: the same causes, under the same names, near each other."""

from typing import Any

from tests.support.sweep import sweep
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.planner.dry_run import dry_run
from threefold.planner.stage_memory import stage_memory

MODEL = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 2048}


@sweep(
    ("parallel", "dtype"),
    [({"dp": 2, "zero": 1}, "bf16"), ({"dp": 4, "zero": 3}, "bf16"), ({"tp": 2, "pp": 2}, "bf16")],
    ids=str,
    slow=(0, 2),
)
def test_each_cause_is_within_3_percent_of_the_peak(parallel: dict[str, Any], dtype: str) -> None:
    sections = {
        "data": {"path": "nowhere", "sequence_length": 256},
        "model": MODEL,
        "parallel": parallel,
        "train": {"global_batch_size": 16, "micro_batch_size": 2},
        "precision": {"dtype": dtype},
    }
    config = resolve(config_of(sections), 2048)
    found = dry_run(config)
    estimated = stage_memory(config, "cpu")[0].by_dry_run
    assert list(estimated) == [*found.causes, "fragmentation"]
    assert sum(found.causes.values()) == found.peak_bytes
    for name, nbytes in found.causes.items():
        assert abs(nbytes - estimated[name]) <= 0.03 * found.peak_bytes, name
