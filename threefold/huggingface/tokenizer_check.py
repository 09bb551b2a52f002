"""Check of a tokenizer by a child process that tries it, once on a machine."""

import hashlib
import os
from contextlib import suppress
from typing import Final

import tokenizers
from platformdirs import user_cache_path

from threefold.errors import UserError
from threefold.files import of_user
from threefold.huggingface.limited import LimitedProcess, Limits, Refused
from threefold.huggingface.tokenizer_trial import UNREADABLE

LIMITS: Final = Limits(seconds=20, waited=120, memory=4 << 30)
"""Limits of trying a tokenizer. One of 262,000 tokens takes 0.4 GB and a second."""


def try_tokenizer(stored: str, named: str, remedy: str) -> None:
    """Have a child process try a tokenizer, unless the user's cache says that it has been tried."""
    version = f"1, with tokenizers {tokenizers.__version__}\n"  # 2 where the trial finds more
    name = hashlib.sha256(version.encode() + stored.encode("utf-8", "replace")).hexdigest()[:32]
    cache = of_user(lambda: user_cache_path("threefold", appauthor=False))
    mark = None if cache is None else cache / "tokenizers" / name
    if mark is not None and os.path.isfile(mark):
        return
    try:
        with LimitedProcess("threefold.huggingface.tokenizer_trial:Trial", limits=LIMITS) as child:
            child.ask(stored)
    except Refused as refused:
        reason, problem = str(refused), "is not a tokenizer.json that can be used"
        if reason.startswith(UNREADABLE):
            reason, problem = reason.removeprefix(UNREADABLE), "is not a tokenizer.json that can be read"
        raise UserError(f"{named} {problem} ({reason}){remedy}") from None
    with suppress(OSError):
        if mark is not None:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
