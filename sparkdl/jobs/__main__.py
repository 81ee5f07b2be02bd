"""The jobs where only the package is installed: ``python -m sparkdl.jobs train --config FILE``."""

import importlib
import sys

JOBS = ("train", "evaluate", "predict", "plan")


def main() -> int:
    """Run the job that the command line names first; returns its exit code."""
    if not {*sys.argv[1:2]} & {*JOBS}:
        print(f"usage: python -m sparkdl.jobs {' | '.join(JOBS)}, and its options", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"sparkdl.jobs.{sys.argv[1]}").main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
