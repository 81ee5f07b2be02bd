"""The jobs where only the package is installed: ``python -m sparkdl.jobs train --config FILE``.

``spark-submit $(python -m sparkdl.jobs --path) train --config FILE`` submits them.
"""

from __future__ import annotations

import importlib
import os
import sys

import sparkdl.jobs

JOBS = ("train", "evaluate", "predict", "plan")


def main(arguments: list[str] | None = None) -> int:
    """Run a job; returns its exit code.

    Args:
        arguments: the job and its options; None for this process's own.
    """
    job, *options = (sys.argv[1:] if arguments is None else arguments) or [""]
    if job == "--path":
        print(os.path.abspath(__file__))
        return 0
    if job not in JOBS:
        print(f"usage: python -m sparkdl.jobs {' | '.join(JOBS)}, and its options", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"sparkdl.jobs.{job}")
    except ModuleNotFoundError as error:  # Exit.SETUP, whose module needs some too
        print(
            f"{job}.py: error: {error} in the driver's Python, {sys.executable}. Start the job "
            "with a Python that has it (spark-submit: PYSPARK_DRIVER_PYTHON), or there pip install "
            "'sparkdl-torch[jobs]', without spark-submit 'sparkdl-torch[spark,jobs]'",
            file=sys.stderr,
        )
        return 5
    return int(module.main(options))


if __name__ == "__main__":
    # As a script of spark-submit, it has its own folder in the path, where plan.py and others lie.
    sys.path[:1] = [each for each in sys.path[:1] if each not in sparkdl.jobs.__path__]
    sys.exit(main())
