"""What --help says about a job."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import TYPE_CHECKING

from jsonargparse import DefaultHelpFormatter

from sparkdl.jobs.exits import Exit

if TYPE_CHECKING:
    from sparkdl.jobs.configuration.grammar import JobName

_DOES: dict[str, str] = {
    "train": "Train a network on a table, compare it with baselines, and save it.",
    "evaluate": "Measure a saved model on a table.",
    "predict": "Write a saved model's predictions for a table.",
}
_EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": ("--estimator.epochs 3", "--run_id 2026-11-23 --log_format json"),
    "evaluate": ("", "--run_id 2026-11-23 --result_file metrics.json"),
    "predict": ("", "--write.format orc --run_id 2026-11-23"),
}


class HelpFormatter(DefaultHelpFormatter):  # type: ignore[misc]
    """Keeps the lines of descriptions, and leaves out lists of hundreds of classes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line + "\n" for line in text.splitlines())

    def _expand_help(self, action: argparse.Action) -> str:
        text = str(super()._expand_help(action))
        text = re.sub(r", known subclasses: [^)]*\)", ")", text)
        return text.replace("``", "")


def describe(job: JobName) -> str:
    """What a job is for, shown above its options.

    Args:
        job: the job.
    """
    lines = [
        _DOES[job],
        "",
        *(f"  python jobs/{job}.py --config conf/flights.yaml {more}" for more in _EXAMPLES[job]),
        f"  spark-submit --master yarn jobs/{job}.py --config conf/flights.yaml",
        "",
        "One file serves train.py, evaluate.py and predict.py; each reads the sections that it",
        "uses. Each key of it can be given here, where it wins. docs/jobs.md explains the grammar.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def exit_codes() -> str:
    """The exit codes, shown below the options."""
    lines = ["exit codes:"]
    for code in Exit:
        first, *rest = textwrap.wrap(code.meaning, 72)
        lines += [f"  {int(code):>3}  {first}", *(f"       {line}" for line in rest)]
    return "\n".join(lines)
