"""What Sphinx does not look for: links of the README, links to notes, files named in the text."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def headings(page: Path) -> set[str]:
    """As links call them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


def test_links_that_sphinx_does_not_follow_lead_to_files_and_headings() -> None:
    """Those of texts that are not on the site, and those of the site's pages to the notes."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")]
    link = re.compile(r"\]\(([^)#\s:]+)(?:#([^)\s]+))?\)")
    links = [(each, *found) for each in pages for found in link.findall(each.read_text())]
    assert len(links) > 200
    assert [
        f"{page.relative_to(ROOT)}: {path}#{anchor}"
        for page, path, anchor in links
        if not (target := page.parent / path).exists()
        or (anchor and anchor not in headings(target))
    ] == []


def test_every_file_that_a_page_names_is_there() -> None:
    """By its path in the repository or in the package; notes tell of what is gone, too."""
    places = [ROOT, *(ROOT / each for each in ("benchmarks", "sparkdl", "sparkdl/spark"))]
    places.append(ROOT / "sparkdl/averager")
    assert [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())
        if not any((place / name).exists() for place in places)
    ] == []
