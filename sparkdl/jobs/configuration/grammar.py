"""The grammar of a job's configuration: one file for train.py, evaluate.py and predict.py.

Each of them checks the sections that it uses, and accepts the others unchecked.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyspark.ml.base import Estimator, Transformer
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.param import Param
from torch import nn

from sparkdl.errors import ConfigError, SetupError, SparkDLError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.jobs.result import Exit
from sparkdl.jobs.sources import Rows, Source
from sparkdl.protocols import ModelBuilder, OptimizerBuilder, SchedulerBuilder
from sparkdl.spark.session.session import create_session

try:
    from jsonargparse import DefaultHelpFormatter, Namespace
except ImportError as error:
    raise SetupError(
        'jobs need jsonargparse: pip install "sparkdl-torch[jobs]" in the driver\'s Python'
    ) from error

from sparkdl.jobs.configuration.parser import (
    JobParser,
    fill_sections,
    require_decimals,
    require_mappings,
    require_one_path,
)
from sparkdl.jobs.configuration.settings import JobName, Settings, built, plain
from sparkdl.jobs.configuration.yaml_text import MODE

SECTIONS: dict[JobName, tuple[str, ...]] = {
    "train": ("estimator", "stages", "baselines", "evaluators", "model"),
    "evaluate": ("model", "trust", "evaluators", "evaluation"),
    "predict": ("model", "trust", "predictions", "write"),
}
"""The sections that each job uses besides ``session``, ``source``, ``rows`` and the run's own."""
OUTPUTS: dict[JobName, str] = {
    "train": "model",
    "evaluate": "evaluation",
    "predict": "predictions",
}
"""The key that says where each job's output goes."""
RESULT_NEUTRAL = ("progress", "checkpointPath", "timeout", "maxFailures")
"""Arguments of the estimator that do not affect its result."""

_MEANS: dict[str, str] = {
    "model": "directory of the model: train.py writes it, the others read it",
    "evaluation": "directory of the metrics, which are in its _result.json",
    "predictions": "directory of the table of predictions",
    "evaluators": "pyspark.ml evaluators by the names of their metrics, for example {AUC: "
    "{class_path: pyspark.ml.evaluation.BinaryClassificationEvaluator}}",
    "stages": "pyspark.ml stages before the estimator and each baseline, saved with the model",
    "baselines": "pyspark.ml estimators by name, which are fitted and evaluated on the same rows",
    "trust": "modules that the model's own classes come from, which may be imported to load it",
}


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How predictions are written.

    Args:
        format: ``parquet``, ``orc``, ``json``, ``csv`` or another that Spark has a writer for.
        columns: those of the predictions' table; all by default.
        partition_by: columns that become folders.
        options: of the writer, for example ``{compression: zstd}``.
        files: how many files to write; as many as there are partitions by default.
    """

    format: str = "parquet"
    columns: list[str] | None = None
    partition_by: list[str] | None = None
    options: dict[str, str] | None = None
    files: int | None = None

    def __post_init__(self) -> None:
        if self.files is not None and self.files < 1:
            raise ConfigError(f"write.files must be at least 1, got {self.files}")
        if self.columns is not None and not self.columns:
            raise ConfigError("write.columns names no column; leave it out for all of them")


def build_parser(job: JobName) -> JobParser:
    """The parser of a job's command line and configuration."""
    used = SECTIONS[job]
    parser = JobParser(
        prog=f"{job}.py",
        usage=f"{job}.py --config FILE [--KEY VALUE] ...",
        description=describe(job),
        epilog=exit_codes(),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        parser_mode=MODE,
    )
    parser.add_argument(
        "--config",
        action="config",
        help="a YAML file; of several, and of the command line, the last value given counts",
    )
    _add_run(parser)
    parser.add_subclass_arguments(
        Source,
        "source",
        required=True,
        fail_untyped=False,
        help="where the rows come from: {class_path: sparkdl.jobs.Files, init_args: {path: ...}}, "
        "sparkdl.jobs.Table, sparkdl.jobs.Query, or a subclass of sparkdl.jobs.Source of your own",
    )
    parser.add_class_arguments(Rows, "rows")
    for name, means in _MEANS.items():
        if name in used and name not in ("evaluators", "stages", "baselines", "trust"):
            parser.add_argument(f"--{name}", type=str | None, default=None, help=means)
    if "trust" in used:
        parser.add_argument("--trust", type=list[str], default=[], help=_MEANS["trust"])
    if "estimator" in used:
        _add_estimator(parser)
    if "stages" in used:
        kinds = list[Estimator | Transformer]  # type: ignore[type-arg]
        _take_untyped(
            parser.add_argument("--stages", type=kinds, default=[], help=_MEANS["stages"])
        )
    for name, kind in (("baselines", Estimator), ("evaluators", Evaluator)):
        if name in used:
            named = dict[str, kind]  # type: ignore[valid-type]
            _take_untyped(
                parser.add_argument(f"--{name}", type=named, default={}, help=_MEANS[name])
            )
    if "write" in used:
        parser.add_class_arguments(TableFormat, "write")
    parser.add_function_arguments(create_session, "session")
    for name in sorted({name for names in SECTIONS.values() for name in names} - set(used)):
        parser.add_argument(f"--{name}", type=Any, default=None, help=argparse.SUPPRESS)
    return parser


def read_settings(job: JobName, arguments: list[str] | None = None) -> Settings:
    """Parse the command line, and build what needs no session.

    Args:
        job: the job.
        arguments: the command line; None for this process's own.

    Raises:
        SystemExit: something is wrong, and was reported; with code 2, or 0 after --help.
    """
    importlib.import_module("sparkdl.callbacks")  # so that short names are found
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    parser = build_parser(job)
    require_mappings(parser, arguments)
    require_decimals(parser, arguments)
    config = parser.parse_args(arguments)
    fill_sections(parser, config)
    output = config.get(OUTPUTS[job])
    if not output:
        parser.refuse(f"--{OUTPUTS[job]} is required: where to write the {OUTPUTS[job]}")
    if job != "train" and not config.model:
        parser.refuse("--model is required: the model to use")
    require_one_path(parser, config, {"model", "predictions"} & set(SECTIONS[job]))
    if config.run_id is not None and not config.run_id.strip():
        parser.refuse("--run_id is empty, so all runs would share it: set it, or omit it")
    if job == "evaluate" and not config.evaluators:
        parser.refuse("--evaluators is required: what to measure")
    if job == "train" and config.evaluators and config.rows.test is None:
        parser.refuse("evaluators need rows: select them with --rows.test")
    if job == "train" and config.baselines and not config.evaluators:
        parser.refuse("baselines are compared by metrics: name them with --evaluators")
    try:
        settings = Settings(
            job=job,
            session=vars(config.session),
            source=built(config.source),
            rows=Rows(**vars(config.rows)),
            output=output,
            sections=config,
            run_id=config.run_id,
            result_file=config.result_file,
            log_format=config.log_format,
            log_level=config.log_level,
            digest=_digest(job, config),
        )
        if job == "train":
            settings.estimator()
        if job == "predict":
            TableFormat(**vars(config.write))
    except (SparkDLError, ValueError, TypeError) as error:
        if isinstance(error, SparkDLError) and not isinstance(error, ConfigError):
            raise
        parser.refuse(str(error), plain(config))
    return settings


def _add_run(parser: JobParser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--run_id",
        type=str | None,
        default=None,
        help="the scheduler's name for this run, the same in each attempt: an output that is "
        "complete for it is not made again, and an interrupted training resumes. Without "
        "one, each start is a run of its own",
    )
    run.add_argument(
        "--result_file",
        type=str | None,
        default=None,
        help="a file on this machine to which the result is written as JSON, even after a failure",
    )
    run.add_argument(
        "--log_format",
        type=Literal["text", "json"],
        default="text",
        help="json writes one object per line to stderr, and the result as the last line of stdout",
    )
    run.add_argument(
        "--log_level",
        type=Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None,
        default=None,
        help="the lowest level logged; WARNING as text, INFO as json",
    )


def _add_estimator(parser: JobParser) -> None:
    # More is accepted than for the arguments themselves: a class with its arguments stands for a
    # builder of it. A bare Callable also takes functions without annotations.
    kinds: dict[str, tuple[Any, str]] = {
        "model": (ModelBuilder | nn.Module | Callable, "the network: a class with its arguments"),
        "loss": (
            nn.Module | Literal["model"] | Callable,
            "(outputs, targets) -> scalar: a function, or a class with its arguments; `model` for "
            "a network that computes its own",
        ),
        "optimizer": (OptimizerBuilder | Callable, "torch's or another class, with its arguments"),
        "scheduler": (
            SchedulerBuilder | Callable | None,
            "torch's or another class, with its arguments",
        ),
    }
    parser.add_class_arguments(
        TorchEstimator, "estimator", skip=set(kinds), instantiate=False, fail_untyped=False
    )
    group = (parser.groups or {})["estimator"]
    for action in group._group_actions:
        param = getattr(TorchEstimator, action.dest.rpartition(".")[2], None)
        if isinstance(param, Param):
            action.help = param.doc
    for name, (kind, means) in kinds.items():
        required = name != "scheduler"
        _take_untyped(
            group.add_argument(f"--estimator.{name}", type=kind, required=required, help=means)
        )


def _take_untyped(action: Any) -> None:
    """Allow the named classes and functions to have arguments without annotations."""
    action.sub_add_kwargs = {"fail_untyped": False}


def _digest(job: JobName, config: Namespace) -> str:
    names = {"source", "rows", *SECTIONS[job]} - {OUTPUTS[job]}
    said = {name: plain(config[name]) for name in names}
    for name in RESULT_NEUTRAL:
        said.get("estimator", {}).pop(name, None)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


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
    """What a job is for, shown above its options."""
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
