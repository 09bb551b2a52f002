"""Warnings about checkpoints that could not be written, pruned or copied, while training continues."""

from threefold.train.callbacks.console import say


class FailureWarning:
    """Prints one sentence when something begins to fail, and is silent until it has worked again.

    Args:
        prints: whether this rank prints.
        consequence: what follows, after a semicolon.
    """

    def __init__(self, prints: bool, consequence: str) -> None:
        self._prints, self._consequence, self._failing = prints, consequence, False

    def failed(self, sentence: str) -> None:
        """It has failed, as a sentence says."""
        if self._prints and not self._failing:
            say(f"Warning: {sentence.removesuffix('.')}; {self._consequence}.")
        self._failing = True

    def worked(self) -> None:
        """It has worked."""
        self._failing = False
