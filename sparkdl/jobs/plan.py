"""The job that plans: profiles of fits in, a table and a suggestion out. It needs no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.jobs.result import Exit, exit_of, finite
from sparkdl.planner.plan import WORKERS, Plan
from sparkdl.planner.profile import Profile


def main(arguments: list[str] | None = None) -> int:
    """Run plan.py; returns its exit code.

    Args:
        arguments: the command line; None for this process's own.
    """
    options = _parser().parse_args(arguments)
    try:
        plan = Plan(
            [_profile(each) for each in options.summary],
            link=options.link,
            measured_on=options.measured_on,
            workers=options.workers,
            rows=options.rows,
        )
        best = plan.best(options.efficiency, max_period=options.max_period)
    except (SparkDLError, OSError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return int(exit_of(error))
    if options.json:
        told = {"table": plan.table.to_dict("records"), "best": asdict(best)}
        print(json.dumps(finite(told), indent=1))
    else:
        print(f"{plan}\n\n{plan.explain()}\n\nBest: {best}")
    return int(Exit.DONE)


def _profile(path: str) -> Profile:
    try:
        return Profile.from_json(Path(path).read_text())
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("plan.py", description=__doc__)
    add = parser.add_argument
    add(
        "--summary",
        nargs="+",
        required=True,
        metavar="FILE",
        help="results of train.py, or files of model.summary.profile.to_json()",
    )
    add("--link", help="what connects the hosts, such as '1 Gbit/s' or '100 Mbit/s, 1 ms'")
    add("--measured_on", help="the links of the fits' own network, unless they were much faster")
    add("--workers", nargs="+", type=int, default=list(WORKERS), help="numbers of workers")
    add("--rows", type=int, help="rows of an epoch, if the fits had a sample")
    add("--efficiency", type=float, default=0.8, help="the least for the suggestion")
    add("--max_period", type=int, help="the longest period for the suggestion")
    add("--json", action="store_true", help="print JSON")
    return parser
