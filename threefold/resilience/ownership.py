"""Owner of a remote address: the run whose checkpoints are copied there, which no other run replaces or continues.

The record `owner.json` stands at the address and, with the same run id, in the run's folder. A run may use an address
that has no owner, and its own: the run id in its folder is the owner's, and the folder is where it was. A folder
without checkpoints, or one that was moved, may continue the owner's run if everything that decides the run's results is
the same when it resumes (`terms_of`); it takes the address over. Each start writes a new `claim`, from which a process
that is still running notices that another one has taken over.
"""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from threefold.checkpoint.folder import code_text, complete, model_files
from threefold.checkpoint.resume import is_decisive
from threefold.checksums import checksum_of_blocks, seal, unseal
from threefold.config import Config
from threefold.data.dataset import Dataset
from threefold.data.order import weights_by_step
from threefold.errors import UserError
from threefold.files import STRICT, parse_facts, parse_json, shown
from threefold.foreign import FolderFiles, write_nofollow

OWNER_FILE: Final = "owner.json"
_FORMAT: Final = {"format": "threefold-owner", "version": 1}

Terms = Mapping[str, str]
"""Everything that decides a run's results, as text by name, such as `optimizer.lr`."""


def terms_of(config: Config, dataset: Dataset) -> dict[str, str]:
    """Return what a folder must have in common with a run to continue it; needs a resolved config."""
    found = {key: json.dumps(value) for key, value in _decisive_settings(config).items()}
    weights = list(config.data.corpora.values())
    if len(weights) > 1:
        (_, first), *later = by_step = weights_by_step(weights)
        found["data.mixture"] = json.dumps(by_step if later else first)
    for number, (tokens, documents) in enumerate(dataset.sizes(), start=1):
        found[f"the data of corpus {number}"] = f"{tokens:,} tokens in {documents:,} documents"
    if config.model.file:
        files = model_files(Path(config.model.file.partition(":")[0]))
        blocks = (part for name, file in sorted(files.items()) for part in (name.encode(), code_text(file).encode()))
        found["the code of model.file"] = f"code with the checksum {checksum_of_blocks(blocks)}"
    return found


def _decisive_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a resolved config that decide a run's results, its beginning and its length included."""
    return {
        key: given.get(name)
        for section, given in config.sections().items()
        for name in {**type(getattr(config, section)).model_fields, **given}
        if is_decisive(key := f"{section}.{name}")
    }


@dataclass(frozen=True)
class Owner:
    """Run that owns an address.

    Attributes:
        run: id of the run, which stays the same wherever it is continued.
        claim: id of the start that wrote the record.
        host, folder, since: where and when that was.
    """

    run: str
    claim: str
    host: str
    folder: str
    since: str
    terms: dict[str, str]
    __pydantic_config__: ClassVar = STRICT

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Return the owner in the text of a record named `where`; raise `UserError` if it is not as it was written."""
        try:
            facts = unseal(parse_json(text, where))
            if facts is None or any(facts.pop(name, None) != value for name, value in _FORMAT.items()):
                raise ValueError
            return parse_facts(cls, facts)
        except (UserError, ValueError, TypeError, AttributeError):
            raise UserError(
                f"{where} is not as a run wrote it; remove it if no other run copies its checkpoints there."
            ) from None

    @classmethod
    def of_folder(cls, run_dir: Path) -> Self | None:
        """Return the record in a run's folder; None if there is none that can be read."""
        try:
            return cls.parse(FolderFiles(run_dir).text(OWNER_FILE), str(run_dir))
        except UserError:
            return None

    def text(self) -> str:
        return json.dumps(seal({**_FORMAT, **asdict(self)}), indent=1) + "\n"

    def __str__(self) -> str:
        return f"the run in {shown(self.folder)} on host {shown(self.host)}, since {self.since}"


@dataclass(frozen=True)
class Claimant:
    """Run in `run_dir` that is about to use an address, with its `terms`."""

    run_dir: Path
    resumes: bool
    terms: Terms

    def refusal(self, owner: Owner, has_copies: bool) -> str | None:
        """Return why this run may not use the address of `owner`, as a clause; None if it may.

        `has_copies` tells whether anything named like a checkpoint is there.
        """
        ours, folder = Owner.of_folder(self.run_dir), os.path.realpath(self.run_dir)
        is_same, is_in_place = ours is not None and ours.run == owner.run, folder == owner.folder
        if is_same and is_in_place:
            return None
        if is_in_place and owner.host == socket.gethostname() and not has_copies:
            return None  # its folder was removed, and the run begins again
        if not self.resumes:
            return "another run than this one"
        if not is_same and complete(self.run_dir):
            return f"and {shown(self.run_dir)} has the checkpoints of another run"
        # First train.max_steps, from which others follow.
        both = sorted(owner.terms.keys() & self.terms.keys(), key=lambda key: (key != "train.max_steps", key))
        if (key := next((key for key in both if owner.terms[key] != self.terms[key]), None)) is not None:
            return f"with {key} {shown(owner.terms[key])} where this run has {shown(self.terms[key])}"
        return None

    def claimed(self, owner: Owner | None) -> Owner:
        """Return the record with which this run takes the address over from `owner`, and write it into the folder."""
        ours = Owner.of_folder(self.run_dir)
        run = (
            owner.run if owner is not None and self.resumes else ours.run if ours is not None else secrets.token_hex(8)
        )
        since = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}"
        place = socket.gethostname(), os.path.realpath(self.run_dir)
        claimed = Owner(run, secrets.token_hex(8), *place, since, dict(self.terms))
        self._write(claimed)
        return claimed

    def adopt(self, owner: Owner) -> None:
        """Write the owner's record into the folder, whose run then continues the owner's."""
        ours = Owner.of_folder(self.run_dir)
        if ours is None or ours.run != owner.run:
            self._write(owner)

    def _write(self, owner: Owner) -> None:
        try:
            fresh = self.run_dir / f"{OWNER_FILE}.tmp"
            write_nofollow(fresh, owner.text(), durable=True)
            fresh.replace(self.run_dir / OWNER_FILE)
        except OSError as error:
            raise UserError(f"Cannot write to --run-dir {shown(self.run_dir)}: {error.strerror}.") from error
