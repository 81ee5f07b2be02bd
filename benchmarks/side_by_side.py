"""A benchmark in this checkout and in another checkout, in turns in one run.

Each checkout runs its own copy of the script on its own code, so renames between the two do not
matter. What is compared are the benchmark's claims, which are ratios to peers measured in the same
minutes: by how much each is worse here, as a median over the turns.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness

ALLOWED = 1.05
"""How many times worse a claim's ratio may be than in the other checkout."""
TIMEOUT_SECONDS = 3_600.0


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--source", type=Path, required=True, help="the checkout to compare with")
    options.add_argument("benchmark", help="its name in benchmarks/ of both, without .py")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to both")
    chosen = harness.parse(options, repeats=3)
    checkouts = {"here": harness.FOLDER.parent, "there": chosen.source.resolve()}
    turns = {
        name: partial(claims_of, checkout, chosen.benchmark, chosen.arguments)
        for name, checkout in checkouts.items()
    }
    measured = harness.interleave(turns, repeats=chosen.repeats)
    harness.report(
        f"side_by_side {chosen.benchmark}",
        compare(measured["here"], measured["there"]),
        {"source": str(chosen.source), "claims_of_each_run": measured},
    )


def claims_of(checkout: Path, benchmark: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a checkout's own copy of a benchmark; returns its claims by their names."""
    folder = checkout / "benchmarks"
    environment = harness.child_environment(source=checkout)
    # The other checkout's helpers must not be found in this one's folder.
    environment["PYTHONPATH"] = str(checkout)
    command = [sys.executable, folder / f"{benchmark}.py", *arguments]
    child = harness.run_child(
        command,
        environment=environment,
        timeout=TIMEOUT_SECONDS,
        # Python looks for modules there before it looks where the environment says.
        folder=checkout,
    )
    claims = {claim["name"]: claim for claim in child["detail"]["claims"]}
    for claim in claims.values():
        print(f"  {checkout}: {claim['name']}: {claim['ratio']}", flush=True)
    return claims


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
            ratio=statistics.median(
                _times_worse(ours[name], theirs[name])
                for ours, theirs in zip(here, there, strict=True)
            ),
            target=ALLOWED,
        )
        for name in common
    ]


def _times_worse(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    more_is_better = ours["bound"] == "at least"
    better, worse = (ours, theirs) if more_is_better else (theirs, ours)
    if worse["ratio"] == better["ratio"]:
        return 1.0  # also where both are 0, as of threads that a run adds
    return float(worse["ratio"] / better["ratio"]) if better["ratio"] else math.inf


if __name__ == "__main__":
    main()
