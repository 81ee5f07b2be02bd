"""Prints how long the tests of each folder took and how many lines they have, as a table.

    python .ci/test_times.py build/ci/tests.xml            to see; several reports add up
    python .ci/test_times.py --write build/ci/tests.xml    into docs/notes/tests.md

Seconds are those of pytest's JUnit report, with fixtures; tests of several processes add up.
"""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "notes" / "tests.md"
BEGIN, END = "<!-- written by .ci/test_times.py -->", "<!-- end -->"


def folder_of(path: Path) -> str:
    """The folder below tests/ that a file belongs to; the file itself at the top."""
    parts = path.parts
    return "/".join(parts[1:3]) if parts[1] in ("spark", "strategies") else parts[1]


def table(reports: list[str]) -> str:
    """The table of some reports, by falling seconds."""
    seconds, tests, lines, files = (Counter[str]() for _ in range(4))
    for path in (ROOT / "tests").rglob("*.py"):
        folder = folder_of(path.relative_to(ROOT))
        lines[folder] += sum(1 for line in path.read_text().splitlines() if line.strip())
        files[folder] += 1
    cases = [case for each in reports for case in ET.parse(each).getroot().iter("testcase")]
    for case in cases:
        path = Path(case.attrib["classname"].replace(".", "/") + ".py")
        while not (ROOT / path).exists():  # a class of tests
            path = path.parent.with_suffix(".py")
        folder = folder_of(path)
        seconds[folder] += float(case.attrib["time"])
        tests[folder] += 1
    order = sorted(lines, key=lambda each: -seconds[each])
    rows = [
        f"| {each} | {seconds[each]:.0f} | {tests[each]} | {files[each]} | {lines[each]} |"
        for each in order
        if tests[each] or lines[each] > 100
    ]
    total = (round(seconds.total()), tests.total(), files.total(), lines.total())
    head = ["| tests/ | seconds | tests | files | lines |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, f"| all | {' | '.join(map(str, total))} |"])


def main(arguments: list[str]) -> None:
    """Print the table, or put it into the page."""
    written = table([each for each in arguments if each != "--write"])
    print(written)
    if "--write" in arguments:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        on = time.strftime("%d %B %Y")
        PAGE.write_text(f"{before}{BEGIN}\n{written}\n\n{on}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
