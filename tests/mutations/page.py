"""The catalogue as tables of Markdown, for the page docs/mutations.md of the site."""

from itertools import groupby

from tests.mutations.catalogue import DOES_NOT_APPLY, NOT_SEEN, Mistake, catalogue


def tables() -> str:
    """Return a table for each subject, one row a mistake."""
    parts = []
    for subject, group in groupby(catalogue(), lambda mistake: mistake.subject):
        parts += [
            f"\n### {subject.replace('-', ' ').capitalize()}\n",
            "| mistake | file | test | verify |",
            "|---|---|---|---|",
        ]
        parts += [_row(mistake) for mistake in group]
    return "\n".join([*parts, ""])


def _row(mistake: Mistake) -> str:
    test = f"`{mistake.test_file.removeprefix('tests/')}::{mistake.test_name}`"
    return f"| {mistake.says} | `{mistake.file.removeprefix('threefold/')}` | {test} | {_verify(mistake)} |"


def _verify(mistake: Mistake) -> str:
    for prefix, shown in ((DOES_NOT_APPLY, "–: "), (NOT_SEEN, "not seen: ")):
        if mistake.verify.startswith(prefix):
            return shown + mistake.verify.removeprefix(prefix)
    return f"`{mistake.verify}`".replace("|", "\\|")
