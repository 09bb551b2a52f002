"""Parity of any training code: a recorder for any script, and a comparison that names the first mistake."""

from threefold.parity.adapters import Adapter
from threefold.parity.placement import Piece, Placement, flat_range, fused, shard, whole
from threefold.parity.recorder import Recorder

__all__ = ["Adapter", "Piece", "Placement", "Recorder", "flat_range", "fused", "shard", "whole"]
