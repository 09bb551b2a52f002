"""Command line: parse, call, print."""

from threefold.cli.main import main

__all__ = ["main"]
