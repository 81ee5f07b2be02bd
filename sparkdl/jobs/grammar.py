"""The grammar of a job's configuration: one file for train.py, evaluate.py and predict.py.

Each of them checks the sections that it uses, and accepts the others unchecked.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]
from pyspark.errors import IllegalArgumentException
from pyspark.ml.base import Estimator, Transformer
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.wrapper import JavaParams

from sparkdl.errors import ConfigError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.jobs import values
from sparkdl.jobs.result import Exit
from sparkdl.jobs.sources import Rows, Source, TableFormat
from sparkdl.jobs.values import Text, YamlError, parse
from sparkdl.redaction import without_credentials, without_secrets
from sparkdl.spark.catalyst.jvm import has_accepted
from sparkdl.spark.session import create_session

JobName = Literal["train", "evaluate", "predict"]

OUTPUTS: dict[JobName, str] = {
    "train": "model",
    "evaluate": "evaluation",
    "predict": "predictions",
}
"""The key that says where each job's output goes."""
SECTIONS: dict[JobName, tuple[str, ...]] = {
    "train": ("estimator", "stages", "baselines", "evaluators", "model"),
    "evaluate": ("model", "trust", "evaluators", "evaluation"),
    "predict": ("model", "trust", "predictions", "write"),
}
"""What decides each job's output, besides ``source`` and ``rows``."""
RUN = ("run_id", "result_file", "log_format", "log_level", "session", "source", "rows")
ARGUMENTS: dict[str, Any] = {
    "session": create_session,
    "rows": Rows,
    "estimator": TorchEstimator,
    "write": TableFormat,
}
"""The sections that are the arguments of something."""
RESULT_NEUTRAL = ("progress", "checkpointPath", "timeout", "maxFailures")
"""Arguments of the estimator that do not affect its result."""
BUILDERS = ("model", "optimizer", "scheduler")
"""Arguments of the estimator that are called to build what they are named after."""
_FLAGS = {"-h": "help", "--help": "help", "--print_config": "print_config"}
_GLOB = re.compile(r"[{[*?\\]")
"""Characters that Hadoop takes for a path pattern; pyspark.ml's loaders cannot escape them."""
_TEMPLATE = re.compile(r"\{\{.*\}\}|\$\{.*\}|\$\(.*\)")
"""What schedulers and shells put a value in the place of."""
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
"""An argument in a docstring."""
_HELP = """usage: {job}.py --config FILE [--KEY VALUE] ...

  python jobs/{job}.py --config conf/flights.yaml --run_id 2026-11-23
  spark-submit --master yarn jobs/{job}.py --config conf/flights.yaml

One YAML file serves train.py, evaluate.py and predict.py; each reads the sections that it uses.
Each key of it can be given here, and then counts, wherever --config stands. Of several files the
last counts; --print_config prints what they say together. docs/jobs.md explains the grammar.
"""


@dataclass(kw_only=True)
class Settings:
    """What a job was asked for, by the configuration's keys; None for those that it does not use.

    Source and rows are built, other objects are not: workers build replicas themselves, and
    pyspark.ml's stages need a session.

    Args:
        run_id: the scheduler's name for this run, the same in each attempt: an output that is
            complete for it is not made again, and an interrupted training resumes. Without one,
            each start is a run of its own
        result_file: a file on this machine to which the result is written as JSON, even after a
            failure
        log_format: json writes one object per line to stderr, and the result as the last line of
            stdout
        log_level: the lowest level logged; WARNING as text, INFO as json
        session: arguments of create_session
        source: where the rows come from: {class_path: sparkdl.jobs.Files, init_args: {path: ...}},
            sparkdl.jobs.Table, sparkdl.jobs.Query, or a subclass of sparkdl.jobs.Source of your own
        rows: which of them are used, and for what
        estimator: the network and how it is trained
        stages: pyspark.ml stages before the estimator and each baseline, saved with the model
        baselines: pyspark.ml estimators by name, which are fitted and evaluated on the same rows
        evaluators: pyspark.ml evaluators by the names of their metrics, for example {AUC:
            {class_path: pyspark.ml.evaluation.BinaryClassificationEvaluator}}
        model: directory of the model: train.py writes it, the others read it
        trust: modules that the model's own classes come from, which may be imported to load it
        evaluation: directory of the metrics, which are in its _result.json
        predictions: directory of the table of predictions
        write: how they are written
    """

    run_id: str | None = None
    result_file: str | None = None
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = None
    session: Any = None
    source: Source | None = None
    rows: Any = None
    estimator: Any = None
    stages: list[Estimator[Any] | Transformer] | None = None
    baselines: dict[str, Estimator[Any]] | None = None
    evaluators: dict[str, Evaluator] | None = None
    model: str | None = None
    trust: list[str] | None = None
    evaluation: str | None = None
    predictions: str | None = None
    write: Any = None
    job: JobName = field(init=False)
    said: dict[str, Any] = field(init=False)
    """All that the configuration says, unchecked, as JSON."""

    @property
    def output(self) -> str:
        """The output's path."""
        return str(vars(self)[OUTPUTS[self.job]])

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the output."""
        names = {"source", "rows", *SECTIONS[self.job]} - {OUTPUTS[self.job]}
        said = {name: self.said.get(name) for name in names}
        if isinstance(estimator := said.get("estimator"), dict):
            said["estimator"] = {n: estimator[n] for n in {*estimator} - {*RESULT_NEUTRAL}}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def shown(self, text: str) -> str:
        """A text such as an error's message, without credentials and the values of secret keys."""
        return without_secrets(text, self.said)

    def build_estimator(self) -> TorchEstimator:
        """The network's estimator.

        Raises:
            ConfigError: an argument is out of range.
        """
        given = {name: each for name, each in self.estimator.items() if name not in BUILDERS}
        builders = {n: values.builder(self.estimator[n]) for n in {*self.estimator} & {*BUILDERS}}
        return TorchEstimator(**values.built(given), **builders)

    def build(self, place: str, value: Any) -> Any:
        """pyspark.ml's stages or evaluators, whose values its Java classes have accepted.

        Python passes them to Java only when they are used, an evaluator after a training.

        Args:
            place: their place in the configuration.
            value: one, a list of them, or a dict.

        Raises:
            ConfigError: an argument is not what pyspark.ml takes.
        """
        if isinstance(value, list):
            return [self.build(f"{place}[{n}]", each) for n, each in enumerate(value)]
        if isinstance(value, dict):
            return {name: self.build(f"{place}.{name}", each) for name, each in value.items()}
        try:
            stage = values.built(value)
            if isinstance(stage, JavaParams):
                has_accepted(stage)
        except (IllegalArgumentException, TypeError, ValueError) as error:
            raise ConfigError(f"{place}: {error}") from error
        return stage


def read_settings(
    job: JobName, command_line: list[str] | None = None, said: dict[str, Any] | None = None
) -> Settings:
    """Read the command line and the files that it names, and build what needs no session.

    Args:
        job: the job.
        command_line: None for this process's own.
        said: where what it says is added, unchecked, whatever is wrong with it.

    Raises:
        ConfigError: something is wrong.
        SystemExit: with code 0, after --help and --print_config.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    said = {} if said is None else said
    plain: dict[str, Any] = {}
    try:
        flags = _read_command_line(command_line, said)
        plain |= json.loads(json.dumps(said))
        settings = None if "help" in flags else _checked(job, said)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(without_secrets(str(error), plain)) from error
    if settings is None or "print_config" in flags:
        as_file = yaml.safe_dump(_as_in_a_file(said), sort_keys=False)
        print(help_of(job) if settings is None else as_file)
        raise SystemExit(0)
    settings.said = plain
    return settings


def help_of(job: JobName) -> str:
    """All keys of a job, and its exit codes."""
    lines = [_HELP.format(job=job)]
    used = (*RUN, *SECTIONS[job])
    for place, called in {"": Settings, **ARGUMENTS}.items():
        means = _meanings(called)
        for name, each in values.parameters_of(called).items():
            if (place or name) in used and name not in ARGUMENTS:
                key = f"{place}.{name}".lstrip(".")
                text = f"--{key} ({values.shown(each.annotation)}): {means.get(name, '')}"
                lines += textwrap.wrap(text, 100, subsequent_indent="    ")
    return "\n".join([*lines, "", "exit codes:", *(f"  {int(e):>3}  {e.meaning}" for e in Exit)])


def _meanings(called: Any) -> dict[str, str]:
    """What the documentation says of each argument."""
    found = dict(_ARGUMENT.findall(inspect.getdoc(called) or ""))
    found |= {name: each.doc for name, each in getattr(called, "declarations", {}).items()}
    return {name: " ".join(each.replace("``", "").split()) for name, each in found.items()}


def _checked(job: JobName, said: dict[str, Any]) -> Settings:
    used = (*RUN, *SECTIONS[job])
    given = {name: each if name in used else None for name, each in said.items()}
    for name in {*ARGUMENTS} & {*used}:
        given[name] = values.arguments(name, ARGUMENTS[name], said.get(name))
    settings = Settings(**values.arguments("", Settings, given))
    settings.job = job
    needed = {"train": (), "evaluate": ("model", "evaluators"), "predict": ("model",)}[job]
    for name in ("source", OUTPUTS[job], *needed):
        if not getattr(settings, name):
            raise ConfigError(f"--{name} is required: {_meanings(Settings)[name]}")
    for name in {"model", "predictions"} & {*used}:
        path = getattr(settings, name)
        if found := _GLOB.search(path):
            raise ConfigError(
                f"--{name} '{path}' contains '{found[0]}', so Spark would read it as a glob "
                "pattern. Use a path without it; or is this a template that was never filled in?"
            )
    if settings.run_id is not None and not settings.run_id.strip():
        raise ConfigError("--run_id is empty, so all runs would share it: set it, or omit it")
    if settings.run_id is not None and _TEMPLATE.search(settings.run_id):
        raise ConfigError(
            f"--run_id '{settings.run_id}' is a template that was never filled in, so all runs "
            "would share it, and be told that the first one's output is complete. Fill it in "
            "before the job starts"
        )
    settings.source, settings.rows = values.built(settings.source), Rows(**settings.rows)
    if job == "train":
        if settings.evaluators and settings.rows.test is None:
            raise ConfigError("evaluators need rows: select them with --rows.test")
        if settings.baselines and not settings.evaluators:
            raise ConfigError("baselines are compared by metrics: name them with --evaluators")
        settings.build_estimator()
    if job == "predict":
        settings.write = TableFormat(**settings.write)
    return settings


def _read_command_line(command_line: list[str] | None, said: dict[str, Any]) -> list[str]:
    """Add what a command line and its files say, whatever else is wrong with it; its flags."""
    left = list(sys.argv[1:] if command_line is None else command_line)
    flags: list[str] = []
    options: list[tuple[str, str]] = []
    wrong: list[ConfigError] = []
    while left:
        name, equals, value = left.pop(0).partition("=")
        try:
            if name in _FLAGS:
                flags.append(_FLAGS[name])
            elif not name.startswith("--"):
                raise ConfigError("the command line has a word that belongs to no option")
            elif not equals and (not left or left[0].startswith("--")):
                raise ConfigError(f"{name}: expected one argument")
            else:
                options.append((name[2:], value if equals else left.pop(0)))
        except ConfigError as error:
            wrong.append(error)
    # Files first: whoever writes --config last means the keys before it no less.
    for name, value in sorted(options, key=lambda option: option[0] != "config"):
        try:
            _add(said, name, value)
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]
    return flags


def _add(said: dict[str, Any], name: str, value: str) -> None:
    """Add a value of the command line, with dots between the keys that lead to it, or a file."""
    if name == "config":
        for key, more in _file(value).items():
            old = said.get(key) if key in ARGUMENTS and isinstance(more, dict) else None
            said[key] = {**old, **more} if isinstance(old, dict) else more
        return
    *above, last = name.split(".", 2 if name.startswith("session.conf.") else -1)
    for each in above:
        below = said.get(each)
        if isinstance(below, str) and not below.startswith("{"):
            below = {"class_path": below}
        said[each] = dict(values.section(each, below))
        said = said[each]
    if last == "class_path":
        said.clear()  # another class has other arguments
    said[last] = Text(value)


def _as_in_a_file(said: Any) -> Any:
    """What a file has to say for the same, where a command line has YAML in one text."""
    if isinstance(said, dict):
        return {name: _as_in_a_file(each) for name, each in said.items()}
    if isinstance(said, Text):
        with suppress(YamlError):
            if isinstance(found := parse(said), (dict, list)) or said in ("null", "~"):
                return found
        return str(said)
    return said


def _file(path: str) -> dict[str, Any]:
    """What a configuration file says."""
    told = without_credentials(path)
    try:
        found = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{told} cannot be read: {error.strerror}") from None
    except ValueError as error:
        words = error if isinstance(error, YamlError) else "is not valid UTF-8"
        raise ConfigError(f"{told} {words}") from None
    if isinstance(found, dict):
        return found
    what = "is empty" if found is None else f"is a {type(found).__name__}"
    raise ConfigError(f"{told} {what}: --config takes a file of keys, such as conf/flights.yaml")
