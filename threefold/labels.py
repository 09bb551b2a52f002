"""What a label may be besides a token."""

from typing import Final

IGNORED: Final = -100
"""The label of a token that does not count for the loss, as in torch's own losses."""
