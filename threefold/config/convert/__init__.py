"""Configs of other systems as configs of Threefold: each system has a table of what is what."""

from threefold.config.convert.conversion import KINDS, Converted, Kind, convert

__all__ = ["KINDS", "Converted", "Kind", "convert"]
