"""The jobs where only the package is installed: ``python -m sparkdl.jobs train --config FILE``.

``spark-submit $(python -m sparkdl.jobs --path) train --config FILE`` submits them.
"""

import importlib
import os
import sys

import sparkdl.jobs

JOBS = ("train", "evaluate", "predict", "plan")


def main() -> int:
    """Run the job that the command line names first; returns its exit code."""
    if sys.argv[1:] == ["--path"]:
        print(os.path.abspath(__file__))
        return 0
    if not {*sys.argv[1:2]} & {*JOBS}:
        print(f"usage: python -m sparkdl.jobs {' | '.join(JOBS)}, and its options", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"sparkdl.jobs.{sys.argv[1]}").main(sys.argv[2:]))


if __name__ == "__main__":
    # As a script of spark-submit, it has its own folder in the path, where plan.py and others lie.
    sys.path[:1] = [each for each in sys.path[:1] if each not in sparkdl.jobs.__path__]
    sys.exit(main())
