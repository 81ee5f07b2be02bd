"""The programs of the README, the quick start, of functions and of the search run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator

ROOT = Path(__file__).parents[2]


def programs(page: str, heading: str | None = None) -> list[str]:
    """The blocks of Python of a page, or of its section of that heading."""
    text = (ROOT / page).read_text()
    if heading is not None:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(blocks: list[str], name: str, **names: Any) -> dict[str, Any]:
    space = {"__name__": "__main__", **names}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{name}, block {number}", "exec"), space)
    return space


def accuracy(space: dict[str, Any]) -> float:
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    return evaluator.evaluate(space["model"].transform(space["df"]))


@pytest.mark.usefixtures("spark")  # which create_session then finds
@pytest.mark.gate
def test_the_readme_trains_a_model_and_runs_a_function(
    tmp_path: Path,
) -> None:
    (notebook,) = programs("README.md", "In a notebook")
    report = tmp_path / "report.html"
    assert notebook.count('"report.html"') == 1
    first = run([notebook.replace('"report.html"', repr(str(report)))], "README")
    assert accuracy(first) > 0.95
    assert "What each worker did when" in report.read_text()

    function = programs("docs/functions.md")[0]
    assert function.count('"/shared/run"') == 2  # the only part that a reader has to have
    mended = function.replace('"/shared/run"', repr(str(tmp_path / "run")))
    second = run([mended], "functions", **first)
    assert len(second["losses"]) == 2
    assert set(second["state"]) >= {"model", "optimizer"}


@pytest.mark.usefixtures("spark")
@pytest.mark.gate
def test_the_quick_start_works_from_top_to_bottom(
    tmp_path: Path,
) -> None:
    # Spark's JVM has a working directory of its own, which would be the repository.
    blocks = [each.replace('"output/', f'"{tmp_path}/') for each in programs("docs/quickstart.md")]
    space = run(blocks, "quick start")
    assert accuracy(space) > 0.95
    assert accuracy({**space, "model": space["again"]}) == accuracy(space)
    assert 1 < len(space["model"].history) < 20  # stopped in time
    assert "What each worker did when" in (tmp_path / "spirals.html").read_text()


@pytest.mark.usefixtures("spark")
@pytest.mark.nightly
def test_the_search_of_the_page_about_metrics_finds_saves_and_loads_the_better_learning_rate(
    tmp_path: Path,
) -> None:
    shown = programs("docs/metrics.md", "Hyperparameter search")
    blocks = [each.replace('"output/', f'"{tmp_path}/') for each in shown]
    space = run(blocks, "search")
    found, again = space["found"], space["again"]
    rates = [setting[space["estimator"].learningRate] for setting in space["grid"]]
    assert rates[found.validationMetrics.index(max(found.validationMetrics))] == 0.03
    assert accuracy({**space, "model": found.bestModel}) > 0.9
    assert space["scores"][32] > space["scores"][2]
    assert again.validationMetrics == found.validationMetrics
    tried = [list(each.values()) for each in again.getEstimatorParamMaps()]
    assert tried == [[0.0001, 32], [0.0001, 128], [0.03, 32], [0.03, 128]]
    assert again.getEstimator().getOptimizer() == "Adam"
    assert accuracy({**space, "model": again.bestModel}) > 0.9
