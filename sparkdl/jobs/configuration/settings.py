"""What a job was asked for, and the objects that its configuration names.

Objects are named by ``class_path`` and ``init_args``. Building them is not left to jsonargparse:
workers must build replicas without it, models saved with their builder load without a pickle, and
pyspark.ml's stages need a session before they are made.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jsonargparse import Namespace
from pyspark.errors import IllegalArgumentException
from pyspark.ml.wrapper import JavaParams

from sparkdl.errors import ConfigError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.jobs.sources import Rows, Source
from sparkdl.redaction import without_secrets
from sparkdl.spark.catalyst.jvm import has_accepted

JobName = Literal["train", "evaluate", "predict"]

BUILDERS = ("model", "optimizer", "scheduler")
"""Arguments of the estimator that are called to build what they are named after."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job was asked for; sections that it does not use are None.

    Attributes:
        job: the job.
        session: arguments of ``create_session``.
        source: where the rows come from.
        rows: which of them are used, and for what.
        output: the output's path.
        sections: the sections of ``SECTIONS[job]``, not yet built.
        run_id: the run that the output belongs to.
        result_file: where else the result is written.
        log_format: ``text`` or ``json``.
        log_level: the lowest level that is logged.
        digest: SHA-256 of all that decides the output.
    """

    job: JobName
    session: dict[str, Any]
    source: Source
    rows: Rows
    output: str
    sections: Namespace
    run_id: str | None
    result_file: str | None
    log_format: str
    log_level: str | None
    digest: str

    def shown(self, text: str) -> str:
        """A text such as an error's message, without credentials and the values of secret keys."""
        return without_secrets(text, plain(self.sections))

    def estimator(self) -> TorchEstimator:
        """The network's estimator, from the section of that name.

        Raises:
            ConfigError: an argument is out of range, or of another type.
        """
        given = {
            name: builder(value) if name in BUILDERS else built(value)
            for name, value in vars(self.sections.estimator).items()
        }
        try:
            return TorchEstimator(**given)
        except TypeError as error:
            refused = re.search(r'param "(\w+)"', str(error))  # as pyspark.ml words it
            if refused is None or refused[1] not in given:
                raise
            value = given[refused[1]]
            got = "null" if value is None else f"a {type(value).__name__}"
            raise ConfigError(
                f"estimator.{refused[1]} cannot be {got}; leave the key out for its default"
            ) from error

    def stages(self) -> list[Any]:
        """The stages before it; needs a session.

        Raises:
            ConfigError: an argument is not what pyspark.ml takes.
        """
        given = self.sections.stages or []
        return [checked_stage(f"stages[{index}]", each) for index, each in enumerate(given)]

    def named(self, section: str) -> dict[str, Any]:
        """Evaluators or baselines by name; needs a session.

        Raises:
            ConfigError: an argument is not what pyspark.ml takes.
        """
        given = self.sections[section] or {}
        return {name: checked_stage(f"{section}.{name}", each) for name, each in given.items()}


def built(spec: Any) -> Any:
    """The object that a specification describes.

    Args:
        spec: a ``Namespace`` with ``class_path`` and ``init_args``, a list or dict of those, or any
            other value, which is returned unchanged.
    """
    if is_spec(spec):
        called = builder(spec)
        return called()
    if isinstance(spec, Namespace):
        return built(spec.as_dict())
    if isinstance(spec, dict):
        return {name: built(each) for name, each in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(built(each) for each in spec)
    return spec


def checked_stage(place: str, spec: Any) -> Any:
    """One of pyspark.ml's stages or evaluators, whose values its Java class has accepted.

    Python passes them to Java only when the stage is used, for an evaluator after a training.

    Args:
        place: its place in the configuration.
        spec: as for ``built``.

    Raises:
        ConfigError: an argument is not one that it takes.
    """
    try:
        stage = built(spec)
        if isinstance(stage, JavaParams):
            has_accepted(stage)
    except (IllegalArgumentException, TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error
    return stage


def builder(spec: Any) -> Any:
    """What makes the object: the class or function, with its arguments; other values unchanged."""
    if not is_spec(spec):
        return built(spec)
    called = pkgutil.resolve_name(spec.class_path)
    arguments = spec.get("init_args")
    given = {name: built(value) for name, value in vars(arguments).items()} if arguments else {}
    # jsonargparse's name for the arguments that only a constructor's **kwargs take.
    given |= built(spec.get("dict_kwargs") or {})
    defaults = {name: p.default for name, p in inspect.signature(called).parameters.items()}
    # pyspark.ml's stages do not take None, so what was not given is left out.
    given = {
        name: value
        for name, value in given.items()
        if value is not None or defaults.get(name, inspect.Parameter.empty) is not None
    }
    return partial(called, **given) if given else called


def is_spec(value: Any) -> bool:
    """Whether a value describes an object to build."""
    return isinstance(value, Namespace) and "class_path" in value


def plain(value: Any) -> Any:
    """A part of a configuration as JSON; functions and classes by their names."""
    if isinstance(value, Namespace):
        return {name: plain(each) for name, each in vars(value).items()}
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
