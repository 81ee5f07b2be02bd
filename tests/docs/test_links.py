"""Every link from one text of the repository to another leads to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for path, anchor in LINK.findall(without_code(page.read_text())):
        target = page.parent / path if path else page
        if not target.exists():
            dead.append(f"{page.relative_to(ROOT)}: there is no {path}")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            dead.append(f"{page.relative_to(ROOT)}: {path} has no heading {anchor}")
    return dead


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert len(TEXTS) > 40
    assert [each for page in TEXTS for each in dead_links(page)] == []


def test_every_file_that_a_page_names_is_there() -> None:
    """By its path in the repository or in the package; notes tell of what is gone, too."""
    places = [ROOT, ROOT / "benchmarks", ROOT / "sparkdl"]
    places += [ROOT / "sparkdl/spark", ROOT / "sparkdl/averager"]
    assert [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())
        if not any((place / name).exists() for place in places)
    ] == []
