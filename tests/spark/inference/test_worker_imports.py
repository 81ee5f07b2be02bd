"""What executors import to predict is a small part of the package."""

from __future__ import annotations

from subprocesses import printed_by

TIMEOUT_SECONDS = 120.0
SENT = (
    "sparkdl.spark.inference.predictor",
    "sparkdl.estimator.head",
)
NOT_NEEDED = ("sparkdl.estimator.estimator", "sparkdl.strategies", "sparkdl.driver", "pyspark.ml")


def test_predicting_imports_nothing_that_only_training_needs() -> None:
    script = (
        f"import importlib, sys\n"
        f"for name in {SENT}: importlib.import_module(name)\n"
        f"print(*(name for name in {NOT_NEEDED} if name in sys.modules))"
    )
    printed = printed_by("-c", script, timeout=TIMEOUT_SECONDS)
    assert printed.split() == []
