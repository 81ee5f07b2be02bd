"""The reference has every public name, and none that is not there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.param import Param

import sparkdl
from sparkdl import errors

FOLDER = Path(__file__).parents[2] / "docs/reference"
PUBLIC = [
    "sparkdl",
    "sparkdl.callbacks",
    "sparkdl.jobs",
    "sparkdl.strategies",
    "sparkdl.testing",
]
DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|autoclass|autofunction|autoexception|automodule):: (\S+)$"
)


def documented() -> dict[str, object]:
    """Every object that a directive names, by its whole name."""
    found: dict[str, object] = {}
    for page in FOLDER.glob("*.rst"):
        current = ""
        for line in page.read_text().splitlines():
            match = DIRECTIVE.match(line)
            if match is None:
                continue
            kind, name = match.groups()
            if kind == "currentmodule":
                current = name
            elif kind != "automodule":
                module, _, name = (name if "." in name else f"{current}.{name}").rpartition(".")
                found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


DOCUMENTED = documented()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    there = {id(each) for each in DOCUMENTED.values()}  # some are names of two modules
    public = importlib.import_module(module)
    names = [name for name in public.__all__ if name != "__version__"]
    assert [name for name in names if id(getattr(public, name)) not in there] == []


def test_every_error_is_in_the_reference() -> None:
    tree = {
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, errors.SparkDLError) and name[0] != "_"
    }
    assert tree - {name.rpartition(".")[2] for name in DOCUMENTED} == set()


def test_what_a_fit_returns_is_in_the_reference() -> None:
    assert "sparkdl.report.TrainingSummary" in DOCUMENTED
    page = (FOLDER / "estimator.rst").read_text()
    for name in ("transform", "evaluate", "udf", "summary", "from_module"):
        assert hasattr(sparkdl.TorchModel, name)
        assert re.search(rf"\b{name}\b", page), name


@pytest.mark.parametrize("estimator", ["TorchClassifier", "TorchRegressor"])
def test_every_param_is_in_a_table(estimator: str) -> None:
    page = (FOLDER / "estimator.rst").read_text()
    tables = re.findall(r"params-table:: (.*)", page)
    assert f"sparkdl.{estimator} sparkdl.TorchEstimator" in tables
    assert {"sparkdl.TorchEstimator", "sparkdl.TorchModel"} <= set(tables)

    def params(of: Any) -> set[str]:
        return {name for name, each in inspect.getmembers(of) if isinstance(each, Param)}

    # As the page says of both.
    missing = params(sparkdl.TorchEstimator) - params(getattr(sparkdl, estimator))
    assert missing == {"outputCols", "outputType"}
