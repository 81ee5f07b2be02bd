"""What the README, the notes and others that Sphinx does not read link to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_links_of_what_is_not_on_the_site_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("docs/notes/*.md")]
    links = [
        (each, link) for each in pages for link in re.findall(r"\]\(([^)#\s]+)", each.read_text())
    ]
    assert len(links) > 40
    assert [
        link for page, link in links if ":" not in link and not (page.parent / link).exists()
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
