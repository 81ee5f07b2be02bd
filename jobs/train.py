"""Predict late flights: train the network and its baselines, and print one table.

    python jobs/train.py --config conf/flights.yaml --estimator.epochs 3
    spark-submit --master yarn jobs/train.py --config conf/flights.yaml

Every key of the file is an argument of the class or function it is named after:
``TorchEstimator``, ``create_session``, ``Split`` and pyspark.ml's ``LogisticRegression``.
"""

import os
import pkgutil
import sys
import time
from functools import partial
from typing import Any

from flights.data import MissingDataError, find_data_folder
from flights.features import FEATURES
from flights.job import run_job
from flights.preparation import Split
from flights.report import format_history, format_scores
from jsonargparse import ArgumentParser, Namespace
from pyspark.ml.classification import LogisticRegression

from sparkdl import TorchEstimator, create_session
from sparkdl.errors import SparkDLError


def build_parser() -> ArgumentParser:
    """Make the parser of the command line and of the YAML file."""
    parser = ArgumentParser(prog="train.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", action="config", help="a YAML file, for example conf/flights.yaml"
    )
    parser.add_function_arguments(create_session, "session")
    parser.add_class_arguments(Split, "split")
    # Its constructor needs a running session, so it is called later.
    parser.add_class_arguments(LogisticRegression, "regression", instantiate=False)
    parser.add_class_arguments(TorchEstimator, "estimator")
    parser.add_argument("--output", default="output/flights-model", help="where the model is saved")
    return parser


def read_config(arguments: list[str] | None = None) -> Namespace:
    """Parse the command line and build what needs no session.

    Args:
        arguments: the command line; None for this process's own.

    Returns:
        ``session`` and ``regression`` (arguments), ``split``, ``estimator`` and ``output``.
    """
    parser = build_parser()
    config = parser.parse_args(arguments)
    for name in ("model", "optimizer"):
        config.estimator[name] = _builder(config.estimator[name])
    size = config.estimator.model.keywords.get("numeric_size")
    if size not in (None, len(FEATURES)):
        parser.error(
            f"estimator.model has numeric_size {size}, but there are {len(FEATURES)} features: "
            f"--estimator.model.init_args.numeric_size {len(FEATURES)}"
        )
    built: Namespace = parser.instantiate(config)
    return built


def _builder(spec: Namespace) -> partial[Any]:
    """Turn class_path and init_args into a builder.

    Replicas are built on the workers, which then need no jsonargparse, and a model that was saved
    with its builder is loaded without unpickling anything.
    """
    return partial(pkgutil.resolve_name(spec.class_path), **vars(spec.init_args))


def main() -> None:
    """Run the job."""
    started = time.perf_counter()
    config = read_config()
    session = vars(config.session)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        session["master"] = None  # spark-submit started this process and has chosen the master
    find_data_folder()
    spark = create_session(**session)
    try:
        spark.sparkContext.setLogLevel("ERROR")
        given = {key: v for key, v in vars(config.regression).items() if v is not None}
        regression = LogisticRegression(**given)
        result = run_job(spark, config.estimator, regression, config.split, config.output)
    finally:
        spark.stop()
    print(f"\n{format_history(result.model.history)}\n\n{format_scores(result.scores)}")
    print(f"Model saved in {config.output}; {time.perf_counter() - started:.0f} s in all.")


if __name__ == "__main__":
    try:
        main()
    except (MissingDataError, SparkDLError) as error:
        sys.exit(f"train.py: {error}")
