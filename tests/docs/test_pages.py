"""The pages: programs run, links lead somewhere, names and messages are those of the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator

import sparkdl
import sparkdl.callbacks
import sparkdl.strategies
from sparkdl import errors

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


def headings(page: Path) -> set[str]:
    """As links call them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


def test_links_that_sphinx_does_not_follow_lead_to_files_and_headings() -> None:
    """Those of texts that are not on the site, and those of the site's pages to the notes."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")]
    link = re.compile(r"\]\(([^)#\s:]+)(?:#([^)\s]+))?\)")
    links = [(each, *found) for each in pages for found in link.findall(each.read_text())]
    assert len(links) > 200
    assert [
        f"{page.relative_to(ROOT)}: {path}#{anchor}"
        for page, path, anchor in links
        if not (target := page.parent / path).exists()
        or (anchor and anchor not in headings(target))
    ] == []


def test_every_file_that_a_page_names_is_there() -> None:
    """By its path in the repository or in the package; notes tell of what is gone, too."""
    places = [ROOT, *(ROOT / each for each in ("benchmarks", "sparkdl", "sparkdl/spark"))]
    places.append(ROOT / "sparkdl/averager")
    assert [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())
        if not any((place / name).exists() for place in places)
    ] == []


REFERENCE = Path(__file__).parents[2] / "docs/reference"
PUBLIC_MODULES = (
    "sparkdl",
    "sparkdl.callbacks",
    "sparkdl.jobs",
    "sparkdl.strategies",
    "sparkdl.testing",
)


def test_every_public_name_and_every_error_is_in_the_reference() -> None:
    names = {name for each in PUBLIC_MODULES for name in importlib.import_module(each).__all__}
    names |= {
        name
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.SparkDLError) and name[0] != "_"
    }
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.rst"))
    documented = re.findall(r"^\.\. auto[a-z]+:: (?:[\w.]+\.)?(\w+)$", pages, re.MULTILINE)
    assert names - {"__version__"} - set(documented) == set()


HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@cache
def templates() -> tuple[str, ...]:
    """Every text in the package, with … where a value is put in."""
    found = []
    for path in (ROOT / "sparkdl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = node.values
                found.append("".join(p.value if is_text(p) else "…" for p in parts))
            elif is_text(node):
                found.append(node.value)
    return tuple(found)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def has_message(message: str) -> bool:
    """Whether the pieces between … stand in one text in this order, and are not trifles."""
    pieces = [piece for piece in message.split("…") if len(piece) > 1]
    assert sum(map(len, pieces)) > 12, f"{message!r} would be found anywhere"
    wanted = re.compile(".*?".join(map(re.escape, pieces)), re.DOTALL)
    return any(wanted.search(template) for template in templates())


def test_the_code_has_the_messages() -> None:
    assert len(HEADINGS) > 15
    unsaid = [message for message in HEADINGS if not has_message(message)]
    assert not unsaid, "\n".join(unsaid)


def test_a_message_that_nobody_says_would_be_noticed() -> None:
    assert not has_message("the workers … are tired and went home")
    assert not has_message(
        "slots … but the cluster has_message …, and all workers must run at the same time"
    )


MIGRATION = (Path(__file__).parents[2] / "docs/migration.md").read_text()
PUBLIC: dict[str, Any] = {
    name: getattr(module, name)
    for module in (sparkdl.strategies, sparkdl.callbacks, sparkdl)
    for name in module.__all__
}


def arguments(of: Any) -> set[str]:
    return set(inspect.signature(of).parameters)


KNOWN = arguments(sparkdl.TorchEstimator) | arguments(sparkdl.run) | set(PUBLIC)


def exists(expression: str) -> bool:
    """Whether an argument, a public name, an attribute or a call of ours is one that there is."""
    node = ast.parse(expression.replace("...", "None"), mode="eval").body
    called = node.func if isinstance(node, ast.Call) else node
    owner, _, name = ast.unparse(called).removeprefix("sparkdl.").rpartition(".")
    if owner:
        documented = inspect.getdoc(PUBLIC.get(owner)) or ""
        return hasattr(PUBLIC.get(owner), name) or f"{name}:" in documented
    given = {each.arg for each in node.keywords} if isinstance(node, ast.Call) else set()
    return name in KNOWN and given - {None} <= (arguments(PUBLIC[name]) if given else set())


def test_ours_exists() -> None:
    rows = [re.split(r" ?\| ?", line) for line in MIGRATION.splitlines() if line.startswith("| ")]
    ours = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    programs = re.findall(r"^```python\n(.*?)^```", MIGRATION, re.MULTILINE | re.DOTALL)
    calls = [node for each in programs for node in ast.walk(ast.parse(each))]
    ours += [
        ast.unparse(n) for n in calls if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert len(ours) > 80
    assert [name for name in ours if not exists(name)] == []
    assert not exists("TorchModel.getHistory")
    assert not exists("GradientAllReduce(compress=True)")


def test_the_defaults_that_are_given_are_so() -> None:
    ours = sparkdl.ParameterAveraging()
    assert (ours.period, ours.average_optimizer_state) == (5, True)
    assert inspect.signature(sparkdl.TorchEstimator.__init__).parameters["batchSize"].default == 32
    assert sparkdl.AsynchronousSGD().barrier == sparkdl.strategies.ASP()
    shared = sparkdl.ThresholdGradientSharing()
    assert (shared.threshold, shared.sparsity, shared.clip) == (1e-3, (1e-4, 1e-2), 5)
