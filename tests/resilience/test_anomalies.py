"""Spikes and limits, without a model."""

from typing import Any

import pytest

from threefold.checkpoint.manifest import AnomalyFacts
from threefold.config import Config
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.resilience.anomalies import AnomalyPolicy, SpikeDetector


def config(**train: Any) -> Config:
    return resolve(config_of({"data": {"path": "x", "skip_steps": [3, "8-9"]}, "train": train}), 100)


def test_a_spike_is_a_multiple_of_the_median_of_a_full_window() -> None:
    spikes = SpikeDetector(3.0, 3)
    for loss, norm in ((100.0, 9.0), (2.0, 1.0)):
        assert spikes.reason(1e9, 1e9) == "", "the window is not full"
        spikes.add(loss, norm)
    spikes.add(1.0, 1.0)
    assert spikes.reason(6.0, 3.0) == "", "exactly the factor"
    assert spikes.reason(6.1, 3.0) == (
        "the loss is 6.1, more than 3 (train.spike_factor) times 2, its median over the last 3 steps"
    )
    assert spikes.reason(1.0, 3.1).startswith("the gradient norm is 3.1, more than 3 ")
    spikes.add(1.0, 1.0)
    assert spikes.reason(3.1, 1.0), "the oldest step has left the window"


def test_without_a_factor_there_are_no_spikes() -> None:
    spikes = SpikeDetector(None, 2)
    for _ in range(5):
        spikes.add(1.0, 1.0)
    assert spikes.reason(1e30, 1e30) == ""
    assert not spikes.recent


def test_a_loss_below_zero_is_compared_with_nothing() -> None:
    spikes = SpikeDetector(2.0, 2)
    spikes.add(-4.0, 1.0)
    spikes.add(-4.0, 1.0)
    assert spikes.reason(-3.0, 1.0) == ""


def test_limits() -> None:
    policy = AnomalyPolicy(config(on_nan="skip", max_consecutive_skips=2, max_skipped_steps=3, max_rollbacks=1))
    assert [policy.skip("nan"), policy.skip("nan")] == ["", ""]
    assert policy.skip("nan") == "train.on_nan is skip, and train.max_consecutive_skips allows 2 skipped steps in a row"
    policy.updated(1.0, 1.0)
    assert policy.skip("spike") == (
        "train.on_spike is skip, and train.max_skipped_steps allows 3 skipped steps in a run"
    )
    policy = AnomalyPolicy(config(max_consecutive_skips=1, max_skipped_steps=3))
    for _ in range(3):
        assert policy.skip("spike") == "", "three may be skipped, not in a row"
        policy.updated(1.0, 1.0)
    assert policy.skip("spike")
    policy = AnomalyPolicy(config(on_nan="rollback", max_rollbacks=1))
    assert policy.roll_back("nan") == ""
    assert policy.roll_back("nan") == "train.on_nan is rollback, and train.max_rollbacks allows 1"


def test_what_is_skipped_and_what_a_checkpoint_keeps() -> None:
    policy = AnomalyPolicy(config(spike_factor=2.0, spike_window=2))
    assert policy.facts() is None
    assert policy.skipped_for(3) == "data.skip_steps has step 3"
    assert policy.skipped_for(9) == "data.skip_steps has steps 8 to 9"
    assert policy.skipped_for(4) == ""
    policy.updated(1.5, 0.1)
    policy.skip("nan")
    policy.roll_back("nan")
    policy.rolled_back(7, 4, "the loss is nan", AnomalyFacts(recent=((1.0, 2.0),)))
    assert policy.skipped_for(5) == "a rollback skips steps 5 to 7"
    assert policy.skipped_for(7) == "a rollback to step 4 skips steps 5 to 7: the loss is nan"
    assert (policy.next_step(5), policy.next_step(3)) == (10, 4)
    policy.skip("spike")
    policy.skip("nan")
    facts = policy.facts()
    assert facts == AnomalyFacts(skipped=((5, 7),), skips=3, consecutive=2, rollbacks=1, recent=((1.0, 2.0),))
    other = AnomalyPolicy(config(spike_factor=2.0, spike_window=2), facts)
    assert other.facts() == facts
    assert other.skipped_for(6) == "a rollback skips steps 5 to 7"


@pytest.mark.parametrize(("count", "first"), [(None, 5), (2, 6), (9, 5)])
def test_how_many_steps_a_rollback_skips(count: int | None, first: int) -> None:
    policy = AnomalyPolicy(config(rollback_steps=count))
    policy.rolled_back(7, 4, "", None)
    facts = policy.facts()
    assert facts is not None
    assert facts.skipped == ((first, 7),)
