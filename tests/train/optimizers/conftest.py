"""The small corpus of the command-line tests."""

from tests.cli.conftest import tokens

__all__ = ["tokens"]
