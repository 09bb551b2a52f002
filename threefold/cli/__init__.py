"""The command line: parses, calls, prints."""

from threefold.cli.main import main

__all__ = ["main"]
