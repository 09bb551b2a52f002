"""Attachment of a recording to a run that `threefold parity run` has started."""

import os
from collections.abc import Sequence
from typing import Final

from threefold.errors import UserError
from threefold.parity.door import MISSING
from threefold.train.attachment import Attachment
from threefold.train.callbacks.base import Callback
from threefold.train.saving import SafeSaving

FOLDER: Final = "THREEFOLD_PARITY"
"""Variable of the environment with the folder of the record."""


class Recording(Attachment):
    """Recording of a run; nothing is imported for runs without one."""

    def callbacks(self, saving: SafeSaving) -> Sequence[Callback]:
        if not os.environ.get(FOLDER):
            return ()
        try:
            import threefold_parity
        except ModuleNotFoundError:
            raise UserError(f"{FOLDER} names a folder for a record, which {MISSING}") from None
        from threefold.parity.of_threefold import ParityRecording

        try:
            return [ParityRecording(self.engine, self.loader, self.start.step)]
        except threefold_parity.UserError as error:
            raise UserError(str(error)) from None
