"""Benchmarks one after another, each with a table of its claims, or beside another commit.

``python benchmarks/run.py throughput "rounds scale"`` runs ``throughput.py`` and one part of
``rounds.py``; without a name all run that need neither root nor a GPU. ``--write`` puts each table
between ``<!-- benchmark throughput -->`` and ``<!-- end -->``, where a page has these lines.
``--against COMMIT`` has a worktree of the commit run its own scripts on its own code, turn by turn
with this one, and tells by how much each claim's ratio to a peer is worse here.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import harness

ROOT = harness.FOLDER.parent
PAGES = (ROOT / "docs" / "numbers.md", ROOT / "README.md")
NAMES = (
    *("rounds", "startup", "throughput", "feed", "feed_files", "images", "memory", "recovery"),
    *("inference", "time_to_accuracy", "duplicates", "volumes"),
)
ALLOWED = 1.05
"""How many times worse a claim's ratio may be than in the other checkout."""
TURNS = 3
BUSY = 0.5
"""The load at which nothing is written down."""
TIMEOUT_SECONDS = 3 * 3_600.0
COLUMNS = ("claim", "ours", "peer", "ratio", "target", "met", "n", "spread")


def main() -> None:
    """Runs what is asked for."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", default=[*NAMES], metavar="NAME")
    options.add_argument("--quick", action="store_true", help="few repeats: a check, not a result")
    options.add_argument("--against", metavar="COMMIT", help="measures that commit in turns")
    options.add_argument("--write", action="store_true", help="puts the tables into the pages")
    chosen = options.parse_args()
    for name in chosen.names:
        if not (harness.FOLDER / f"{name.partition(' ')[0]}.py").exists():
            options.error(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    if chosen.write and (chosen.quick or chosen.against):
        options.error("--write is for whole results, without --quick and --against")
    if chosen.write and (load := os.getloadavg()[0]) > BUSY:
        options.error(f"--write: the load is {load:.2f}, and may be {BUSY} at most")
    with worktree(chosen.against) if chosen.against else nullcontext() as there:
        failed = [each for each in chosen.names if not ran(each, there, chosen)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def ran(name: str, there: Path | None, chosen: argparse.Namespace) -> bool:
    """Runs a benchmark, and shows and writes its table; returns whether that succeeded."""
    try:
        if there is None:
            table = alone(name, quick=chosen.quick)
        else:
            table = beside(name, there, quick=chosen.quick)
    except (RuntimeError, ValueError) as error:
        print(f"{name}: {error}", flush=True)
        return False
    print(f"\n{name}\n\n{table}\n", flush=True)
    if chosen.write:
        print(f"written into {write(name, table, PAGES) or 'no page'}", flush=True)
    return True


def alone(name: str, *, quick: bool) -> str:
    """Runs a benchmark here; returns its table, with a line of what it was measured on."""
    before = os.getloadavg()[0]
    detail = measured(name, ROOT, quick=quick)
    machine, commit = detail["machine"], _git("describe", "--always", "--dirty", "--abbrev=8")
    on = ", ".join(f"{key} {value}" for key, value in machine.items() if key != "cpus" and value)
    load = f"load {before:.2f} before and {os.getloadavg()[0]:.2f} after"
    line = f"{commit}, {time.strftime('%-d %B %Y')}, {machine['cpus']} cores, {on}, {load}"
    return f"{line}\n\n{table_of(detail['claims'])}"


def beside(name: str, there: Path, *, quick: bool) -> str:
    """Runs a benchmark here and in another checkout; returns the table of what is worse here."""
    if not (there / "benchmarks" / f"{shlex.split(name)[0]}.py").exists():
        raise ValueError("that commit has no such script")
    turns = {
        each: partial(_by_name, name, checkout, quick=quick)
        for each, checkout in {"here": ROOT, "there": there}.items()
    }
    runs = harness.interleave(turns, repeats=1 if quick else TURNS)
    return table_of([each.as_json() for each in compare(runs["here"], runs["there"])])


def _by_name(name: str, checkout: Path, *, quick: bool) -> dict[str, Any]:
    return {claim["name"]: claim for claim in measured(name, checkout, quick=quick)["claims"]}


def measured(name: str, checkout: Path, *, quick: bool) -> dict[str, Any]:
    """Runs a checkout's own copy of a benchmark on its own code; returns what it found."""
    script, *given = shlex.split(name)
    environment = harness.child_environment(source=checkout)
    # The other checkout's helpers must not be found in this one's folder.
    environment["PYTHONPATH"] = str(checkout)
    detail: dict[str, Any] = harness.run_child(
        [sys.executable, checkout / "benchmarks" / f"{script}.py", *given, *["--quick"] * quick],
        environment=environment,
        timeout=TIMEOUT_SECONDS,
        # Python looks for modules there before it looks where the environment says.
        folder=checkout,
    )["detail"]
    return detail


def compare(
    here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]
) -> list[harness.Claim]:
    """Returns how many times worse each shared claim is here, as a median over the turns.

    Raises:
        ValueError: the two have no claim in common.
    """
    common = [name for name in here[0] if name in there[0]]
    if not common:
        raise ValueError(f"no claim in common: here {list(here[0])}, there {list(there[0])}")
    return [
        harness.Claim(
            name=f"{name}, times worse than there",
            ratio=harness.Median(
                [_times_worse(a[name], b[name]) for a, b in zip(here, there, strict=True)]
            ),
            target=ALLOWED,
            ours=harness.Median([each[name]["ratio"] for each in here]),
            peer=harness.Median([each[name]["ratio"] for each in there]),
        )
        for name in common
    ]


def _times_worse(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    more_is_better = ours["bound"] == "at least"
    better, worse = (ours, theirs) if more_is_better else (theirs, ours)
    if worse["ratio"] == better["ratio"]:
        return 1.0  # also where both are 0, as of threads that a run adds
    return float(worse["ratio"] / better["ratio"]) if better["ratio"] else math.inf


def table_of(claims: Sequence[Mapping[str, Any]]) -> str:
    """Returns claims as a table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for claim in claims:
        unit = claim.get("unit") or ""
        row = [claim["name"].replace("|", r"\|")]
        row += [f"{_shown(claim[side])} {unit}".strip() for side in ("ours", "peer")]
        row += [_shown(claim["ratio"]), f"{claim['bound']} {claim['target']:g}"]
        row += ["yes" if claim["met"] else "**no**", str(claim.get("n", ""))]
        lines.append([*row, " to ".join(map(_shown, claim.get("spread", [])))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def write(name: str, table: str, pages: Sequence[Path]) -> list[str]:
    """Puts a table between its marks in pages; returns the names of those that have them."""
    marked = re.compile(rf"(<!-- benchmark {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    written = []
    for page in pages:
        text, count = marked.subn(lambda found: f"{found[1]}{table}\n{found[2]}", page.read_text())
        if count:
            page.write_text(text)
            written.append(page.name)
    return written


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A checkout of a commit, which is removed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "there"
        _git("worktree", "add", "--detach", str(there), commit)
        try:
            yield there
        finally:
            _git("worktree", "remove", "--force", str(there))


def _git(*arguments: str) -> str:
    try:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"git {' '.join(arguments)} failed") from error


if __name__ == "__main__":
    main()
