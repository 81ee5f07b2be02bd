"""How Sphinx builds the site: `make docs`.

Pages are the Markdown files of this folder, which read as well where they lie; the reference is
made of the docstrings, and the notebooks of examples/ are shown with the outputs that they have.
"""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import sparkdl

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))  # for params_table

project = "sparkdl"
copyright = "the sparkdl authors, Apache License 2.0"
version = release = sparkdl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "params_table",
]
exclude_patterns = ["_build", "notes"]

html_theme = "pydata_sphinx_theme"
html_title = "sparkdl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "secondary_sidebar_items": ["page-toc"],
}
html_sidebars = {page: [] for page in ("index", "quickstart", "migration", "troubleshooting")}

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
# A notebook takes a Spark session, so a test runs each; the site shows what it printed when saved.
nb_execution_mode = "off"
nb_merge_streams = True

default_role = "code"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the arguments' text says it, and Google's style has no room for both
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    *("Rule", "Phases", "When", "When not"),  # of strategies
    # of TorchEstimator's arguments
    *((each, "params_style") for each in ("Training", "Workers", "Columns", "Rows", "Validation")),
    *((each, "params_style") for each in ("Outputs", "Monitoring", "Recovery", "Network")),
]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "reference/changelog.md",
}
"""Files outside this folder that are pages of the site, and as which."""

_OUTSIDE = re.compile(r"\[([^\[\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def _link(found: re.Match[str], to_docs: str) -> str:
    text, path, anchor = found.groups()
    if path in PAGES:
        return f"[{text}]({to_docs}{PAGES[path]}{anchor or ''})"
    if path.startswith("docs/notes/"):  # not on the site
        return f"`{path}` in the repository"
    if path.startswith("docs/"):
        return f"[{text}]({to_docs}{path.removeprefix('docs/')}{anchor or ''})"
    if path.startswith("examples/"):
        return f"[{text}]({to_docs}{path})"
    if not (ROOT / path).exists():
        raise ValueError(f"a page links to {path}, which is not in the repository")
    return f"{text} (`{path}` in the repository)" if path not in text else f"`{path}`"


def stay_on_the_site(app: Any, name: str, source: list[str]) -> None:
    """Turn links that lead out of docs/ or examples/ in the repository into links between pages."""
    if "/" not in name or name.startswith("examples/"):
        to_docs = "../" * name.count("/")
        source[0] = _OUTSIDE.sub(partial(_link, to_docs=to_docs), source[0])


def name_every_page(app: Any, name: str, source: list[str]) -> None:
    """List pages that no table of contents has at the end of the guides, so that none is lost."""
    if name == "guides":
        listed = {"index"}
        for page in Path(app.srcdir).glob("*.md"):
            for toctree in re.findall(r"```{toctree}(.*?)```", page.read_text(), re.DOTALL):
                listed |= set(re.findall(r"^(?:.*<)?([\w/]+)>?$", toctree, re.MULTILINE))
        more = sorted({page.stem for page in Path(app.srcdir).glob("*.md")} - listed)
        if more:
            source[0] += (
                "\n```{toctree}\n:caption: More\n:maxdepth: 1\n\n" + "\n".join(more) + "\n```\n"
            )


def fetch_notebooks(app: Any) -> None:
    """Copy the notebooks to where Sphinx finds pages; links among them do not outlive a symlink."""
    copies = Path(app.srcdir) / "examples"
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        shutil.copy2(notebook, copies)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", fetch_notebooks)
    app.connect("source-read", stay_on_the_site)
    app.connect("source-read", name_every_page)
