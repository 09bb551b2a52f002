"""Settings of Sphinx, with which `make docs-site` makes the site from these pages; the pages read as well without it."""

project = "Threefold"
copyright = "The Threefold authors; Apache-2.0"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
suppress_warnings: list[str] = []

myst_heading_anchors = 4
highlight_language = "none"

html_theme = "furo"
html_title = "Threefold"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
