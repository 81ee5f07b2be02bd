"""A hundred thousand malformed inputs for every port that is opened and every file that is read.

    python benchmarks/fuzz.py                          all targets, one after another
    python benchmarks/fuzz.py averager images          some of them
    python benchmarks/fuzz.py averager --only 258      one input once more, with its traceback

An input is a good message, conversation or file that was made wrong in its fields, types, lengths,
order, nesting or bytes; ports are called over TCP, local sockets and TLS, with the token and
without. It must be read as if nothing were wrong, or end in an error of the project's own, before
its deadline; memory must not grow, no thread be left, and rejected input change nothing.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from fuzzing import TARGETS, target_of
from fuzzing.loop import run
from fuzzing.shards import Outcome, spread
from harness import Claim, parse, parser, report


def read_one(name: str, seed: int, index: int) -> None:
    """Read one input in this process and say what came of it."""
    with target_of(name) as target:
        tally = run(target, seed, [index])
    for cause, finding in tally.findings.items():
        print(f"{name}, input {index} of seed {seed}: {cause}\n{finding.text}")
    if not tally.findings:
        print(f"{name}, input {index} of seed {seed}: nothing is wrong")
    sys.exit(bool(tally.findings))


def show(name: str, outcome: Outcome, seed: int) -> None:
    """Print what came of a target."""
    tally = outcome.tally
    print(
        f"{name}: {tally.tried} inputs in {tally.seconds:.0f} s, {tally.accepted} of them read as "
        f"if good; memory {tally.early_mb:.0f} MB early, {tally.late_mb:.0f} MB late"
    )
    for file, share in outcome.covered.items():
        missed = ", ".join(_ranges(outcome.missed[file]))
        print(f"    {share:4.0%} of {file}" + (f", without {missed}" if missed else ""))
    ordered = sorted(tally.findings.items(), key=lambda pair: -pair[1].times)
    for cause, finding in ordered:
        print(
            f"    {finding.times} x {cause}; the first again: "
            f"python benchmarks/fuzz.py {name} --seed {seed} --only {finding.index}"
        )
    sys.stdout.flush()


def _ranges(lines: list[int]) -> list[str]:
    """Line numbers, with consecutive ones merged into ranges."""
    found: list[list[int]] = []
    for line in lines:
        if found and line == found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in found]


def keep(folder: Path, name: str, outcome: Outcome) -> None:
    """Write the tracebacks of what was found, one file per target."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        f"{finding.times} x {cause}, first input {finding.index}\n\n{finding.text}\n"
        for cause, finding in outcome.tally.findings.items()
    ]
    (folder / f"{name}.txt").write_text("\n".join(texts))


def options() -> argparse.Namespace:
    """Read the command line."""
    known = parser(__doc__)
    known.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    known.add_argument("--inputs", type=int, default=100_000, help="of each target")
    known.add_argument("--seed", type=int, default=1)
    known.add_argument("--processes", type=int, default=2)
    known.add_argument("--only", type=int, help="the number of one input to read once more")
    known.add_argument("--tracebacks", type=Path, help="a directory for the tracebacks found")
    parsed = parse(known, repeats=1)
    if unknown := set(parsed.targets) - set(TARGETS):
        known.error(f"there is no target {', '.join(sorted(unknown))}")
    parsed.targets = parsed.targets or list(TARGETS)
    if parsed.quick:
        parsed.inputs = min(parsed.inputs, 1_000)
    return parsed


def main() -> None:
    chosen = options()
    if chosen.only is not None:
        for name in chosen.targets:
            read_one(name, chosen.seed, chosen.only)
    with_coverage = False
    with contextlib.suppress(ImportError):
        import coverage  # noqa: F401

        with_coverage = True
    if not with_coverage:
        print("without coverage: pip install 'sparkdl-torch[test]'")
    outcomes: dict[str, Outcome] = {}
    for name in chosen.targets:
        outcomes[name] = spread(
            name, chosen.seed, chosen.inputs, chosen.processes, with_coverage=with_coverage
        )
        show(name, outcomes[name], chosen.seed)
        if chosen.tracebacks is not None:
            keep(chosen.tracebacks, name, outcomes[name])
    tallies = [outcome.tally for outcome in outcomes.values()]
    found = sum(len(tally.findings) for tally in tallies)
    whole = all(tally.tried == chosen.inputs for tally in tallies)
    growth = max(tally.growth for tally in tallies)
    measured: dict[str, Any] = {
        "inputs": chosen.inputs,
        "seed": chosen.seed,
        "found": {name: len(each.tally.findings) for name, each in outcomes.items()},
        "seconds": {name: round(each.tally.seconds) for name, each in outcomes.items()},
        "coverage": {
            name: {file: round(share, 3) for file, share in each.covered.items()}
            for name, each in outcomes.items()
        },
    }
    report(
        "fuzz",
        [
            Claim(
                name="all as it should be",
                ratio=float(whole and not found),
                target=1.0,
                at_least=True,
            ),
            Claim(name="memory, late / early", ratio=growth, target=1.05),
        ],
        measured,
    )


if __name__ == "__main__":
    main()
