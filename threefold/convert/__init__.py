"""Conversion of configs of Megatron-LM, PaddleFleetX and Colossal-AI, with a key mapping for each system."""

from threefold.convert.conversion import KINDS, Converted, Kind, convert, unmapped_lines

__all__ = ["KINDS", "Converted", "Kind", "convert", "unmapped_lines"]
