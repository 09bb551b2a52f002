"""Configs of other systems as configs of Threefold: each system has a table of what is what."""

from threefold.config.convert.conversion import KINDS, Converted, convert, unmapped_lines
from threefold.config.convert.detection import Kind

__all__ = ["KINDS", "Converted", "Kind", "convert", "unmapped_lines"]
