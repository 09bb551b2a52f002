"""Prepares a checkout for the build of a release: python .ci/release.py TAG ADDRESS, the repository's address.

The tag must be that of the package's version and of CITATION.cff, and the changelog must have a section of it. The
links of the README, which are relative in the repository, become absolute ones to the tag, as its text is also shown
elsewhere, and the package gets the addresses of its pages (`[project.urls]`).
"""

import re
import sys
from pathlib import Path

PICTURES = (".png", ".svg", ".jpg")


def absolute(text: str, address: str, tag: str) -> str:
    """Return Markdown with links to the files of a tag in place of relative ones."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1].endswith(PICTURES) else "blob"
        return f"]({address}/{kind}/{tag}/{found[1]}{found[2] or ''})"

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def with_urls(project: str, address: str, tag: str) -> str:
    """Return the text of pyproject.toml with the table of addresses."""
    pages = {
        "Homepage": address,
        "Documentation": f"{address}/blob/{tag}/docs/index.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    return project + "\n[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())


def problem(root: Path, tag: str) -> str:
    """Return why the checkout is not that of the tag; empty if it is."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "threefold/__init__.py").read_text(), re.MULTILINE)
    version = found[1] if found else ""
    if tag != f"v{version}":
        return f"the tag is {tag}, but the package's version is {version}"
    parity = re.search(
        r'^__version__ = "(.+)"$', (root / "parity/threefold_parity/__init__.py").read_text(), re.MULTILINE
    )
    if parity is None or parity[1] != version:
        return f"threefold-parity does not have the version {version}"
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        return f"CITATION.cff does not have the version {version}"
    heading = re.search(rf"^## {re.escape(version)}\b(.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None or "not yet" in heading[1]:
        return f"CHANGELOG.md has no section of the released version {version}"
    return ""


def main(tag: str, address: str) -> None:
    root = Path(__file__).parents[1]
    if found := problem(root, tag):
        sys.exit(f"Error: {found}.")
    readme, project = root / "README.md", root / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(), address, tag))
    project.write_text(with_urls(project.read_text(), address, tag))


if __name__ == "__main__":
    main(*sys.argv[1:])
