"""Converts configs of Megatron-LM, PaddleFleetX and Colossal-AI; each system has a key mapping."""

from threefold.config.convert.conversion import KINDS, Converted, convert, unmapped_lines
from threefold.config.convert.detection import Kind

__all__ = ["KINDS", "Converted", "Kind", "convert", "unmapped_lines"]
