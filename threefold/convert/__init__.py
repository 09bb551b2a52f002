"""Converts configs of Megatron-LM, PaddleFleetX and Colossal-AI; each system has a key mapping."""

from threefold.convert.conversion import KINDS, Converted, Kind, convert, unmapped_lines

__all__ = ["KINDS", "Converted", "Kind", "convert", "unmapped_lines"]
