"""The catalogue of mistakes: each a replacement of one piece of the package's text, with the test and the `threefold
verify` command that see it."""

import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "catalogue"
DOES_NOT_APPLY, NOT_SEEN = "no: ", "not seen: "


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: of one word for the command line.
        says: what is wrong, as a sentence.
        subject: of its file in the catalogue.
        file: the file of the package that has it, from the root of the repository on.
        old: text that occurs in the file once.
        new: what the mistake has in its place.
        test: the test that has to fail, as pytest is given it.
        verify: the arguments of the `threefold verify` command that has to find a departure; or `no: ` and why verify
            cannot see such a mistake, or `not seen: ` and why it does not yet.
    """

    name: str
    says: str
    subject: str
    file: str
    old: str
    new: str
    test: str
    verify: str

    @property
    def command(self) -> list[str]:
        """The arguments of `threefold verify`; none where it does not see the mistake."""
        return [] if self.verify.startswith((DOES_NOT_APPLY, NOT_SEEN)) else shlex.split(self.verify)

    @property
    def test_file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def test_name(self) -> str:
        """The name of the test's function."""
        return self.test.partition("::")[2].partition("[")[0]

    def put_into(self, root: Path) -> str:
        """Make the mistake in the copy of the repository at `root`; returns the file's text before.

        Raises:
            ValueError: the old text does not occur in the file exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: `old` occurs {count} times in {self.file}, but has to occur once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def catalogue() -> list[Mistake]:
    """All mistakes, subject by subject."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        found += [Mistake(name=name, subject=path.stem, **values) for name, values in entries.items()]
    return found
