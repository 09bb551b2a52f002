"""Ignored labels: the label of tokens that add nothing to the loss."""

from typing import Final

IGNORE_INDEX: Final = -100
"""The ignored label: its token adds nothing to the loss. As `ignore_index` of torch's own losses."""
