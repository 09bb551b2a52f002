"""The small runs of the training tests."""

from tests.train.conftest import small_run

__all__ = ["small_run"]
