"""Settings of Sphinx, with which `make docs-site` makes a site of these pages.

The pages link to each other and into the repository as they do on its own pages. For the site, links to a file that is
no page become downloads, those to a folder plain text, and pages of `REPOSITORY` have the text of a file elsewhere.
Where a page has `<!-- generated: NAME -->`, the site has the part that `docs/generate.py` wrote.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

from sphinx.application import Sphinx

DOCS: Final = Path(__file__).parent
REPOSITORY: Final = {
    "contents/results": "benchmarks/RESULTS.md",
    "contents/contributing": "CONTRIBUTING.md",
    "contents/changelog": "CHANGELOG.md",
    "contents/security": "SECURITY.md",
    "contents/parity": "parity/README.md",
    "contents/parity_bugs": "benchmarks/parity_bugs.md",
}
"""Page of the site → file of the repository whose text it has."""

project = "Threefold"
copyright = "The Threefold authors; Apache-2.0"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
if tags.has("online"):  # noqa: F821, which Sphinx defines: `make docs-site SPHINX_OPTIONS='-t online'`
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
exclude_patterns = ["_build"]

myst_heading_anchors = 4
add_module_names = False
toc_object_entries = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
highlight_language = "none"

html_theme = "furo"
html_title = "Threefold"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

PARTS: Final = DOCS / "_build" / "parts"
GENERATED: Final = re.compile(r"<!-- generated: ([\w/-]+) -->\n.*?<!-- end -->", re.DOTALL)
UNSEARCHED: Final = ("contents/changelog",)
"""Pages that the search does not find."""
LINK: Final = re.compile(r"\]\(([^)#: ]+)(#[^)]*)?\)")


def setup(app: Sphinx) -> None:
    """Have links rewritten as pages are read."""
    app.connect("source-read", rewrite_links)


def rewrite_links(app: Sphinx, docname: str, source: list[str], *_: Any) -> None:
    """Turn links out of this folder into ones that the site has; `source` holds the text of the page."""
    page, file = DOCS / f"{docname}.md", DOCS / f"{docname}.md"
    if docname in REPOSITORY:
        file = DOCS.parent / REPOSITORY[docname]
        source[0] = file.read_text(encoding="utf-8")
        app.env.note_dependency(str(file))

    def inserted(mark: re.Match[str]) -> str:
        part = PARTS / f"{mark[1]}.md"
        app.env.note_dependency(str(part))
        return part.read_text(encoding="utf-8")

    source[0] = GENERATED.sub(inserted, source[0])
    if docname in UNSEARCHED:
        source[0] = f"---\nno-search: true\n---\n\n{source[0]}"
    pages = {DOCS.parent / name: DOCS / f"{each}.md" for each, name in REPOSITORY.items()}

    def rewritten(link: re.Match[str]) -> str:
        target = (file.parent / link[1]).resolve()
        if target.is_dir():
            return "]"
        where = pages.get(target, target)
        if where.suffix == ".md" and not where.is_relative_to(DOCS):  # no page: its text, as a file
            return "]"
        return f"]({os.path.relpath(where, page.parent)}{link[2] or ''})"

    source[0] = LINK.sub(rewritten, source[0])
    if docname == "api":  # the order of its table
        found = [link[1].removesuffix(".md") for link in LINK.finditer(source[0]) if link[1].startswith("api/")]
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *found, "```\n"])
